"""Loops over blocks of rows, so that intermediate values stay in fast memory."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import Array, lax

# Rows of a step, by the backend. On a CPU, the float32 values of a step (512 KiB) stay in a core's
# cache from the decoding to the code. As one fused pass over a large array, XLA:CPU decodes twice
# and spills every intermediate to memory, which takes three times as long. A TPU is faster the
# larger a step is, but the compiler takes longer. Others do all rows in one step.
_BLOCK_ROWS = {"cpu": 512, "tpu": 2048}

Carry = TypeVar("Carry")


def block_rows(num_rows: int) -> int:
    """Return the rows of a block."""
    # Of the backend of this process, also when that compiles for another platform: shapes are fixed
    # before the platform is.
    return min(num_rows, _BLOCK_ROWS.get(jax.default_backend(), num_rows))


def for_each_block(
    num_rows: int, step: Callable[[Array | int, int, Carry], Carry], carry: Carry
) -> Carry:
    """Call `carry = step(first, count, carry)` for blocks that cover all rows.

    The last block is moved back to end with the rows. Some rows are then computed twice, so a step
    must be a pure function of its rows.
    """
    count = block_rows(num_rows)
    steps = -(-num_rows // count)
    if steps == 1:
        return step(0, count, carry)

    def body(index: Array, carry: Carry) -> Carry:
        return step(lax.min(index * count, num_rows - count), count, carry)

    return lax.fori_loop(0, steps, body, carry)
