"""Loops over blocks of rows for the XLA backend."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array, lax

from dynamiq_jax.codec.layout import Layout, WidthClass

# Rows per step on a CPU. A step's float32 values (512 KiB) stay in a core's cache from the decode
# to the pack; as one fused pass over a large array XLA:CPU decodes twice and spills every
# intermediate to memory (measured: 3x slower).
_CPU_BLOCK_ROWS = 512

Carry = TypeVar("Carry")


def block_rows(width_class: WidthClass) -> int:
    """Rows that one step of a loop handles: a function of the class's shape and the platform."""
    if jax.default_backend() == "cpu":
        return min(width_class.rows, _CPU_BLOCK_ROWS)
    return width_class.rows


def for_each_block(
    layout: Layout, step: Callable[[WidthClass, Array | int, int, Carry], Carry], carry: Carry
) -> Carry:
    """Calls `carry = step(width_class, start, rows, carry)` for blocks that cover every class.

    `start` counts rows from the start of the class. The last block of a class is moved back to end
    with it, so a step must be a pure function of its rows: some are done twice, with the same
    result.
    """
    for width_class in layout.classes:
        rows = block_rows(width_class)
        steps = -(-width_class.rows // rows)
        if steps == 1:
            carry = step(width_class, 0, rows, carry)
            continue

        def body(
            index: Array, carry: Carry, width_class: WidthClass = width_class, rows: int = rows
        ) -> Carry:
            start = lax.min(index * rows, width_class.rows - rows)
            return step(width_class, start, rows, carry)

        carry = lax.fori_loop(0, steps, body, carry)
    return carry
