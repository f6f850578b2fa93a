"""The rows of one program of a Triton kernel, how its threads hold them, and how it is started.

A row of 256 lanes is handled as eight pieces [rows, 32]: a Triton value cannot be sliced, and in
every plane of a message the lanes of a piece are 32 neighboring bytes at one shift. A thread holds
four neighboring lanes of a piece, 16 bytes of a float32 gradient. The codes of four lanes share one
32-bit word, [rows, 8] for a piece, and are cut from planes and merged into them four at a time.

One body serves rows of all widths. Numbers that depend on the width are read from a table by the
class of the block, and planes that the width lacks are skipped.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import implementation
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.levels import Levels, top_code
from pallas_kernels.codec.packing import planes

PIECES, LANES = 8, 32  # of a row, of a piece
U32 = jnp.uint32
_CLASS_FIELDS = 5


class Config(NamedTuple):
    """Rows of one program, and the warps that share them: powers of two, the same for all shapes.

    16 rows on 4 warps give every thread four lanes of each of the eight pieces of a row: 128 bytes
    of a float32 gradient in flight.
    """

    rows: int = 16
    warps: int = 4

    def programs(self, rows: int) -> int:
        """Return the number of programs that cover `rows` rows; the last one may overhang."""
        return -(-rows // self.rows)


def launch(
    kernel: Callable,
    grid: tuple[int, ...],
    config: Config,
    operands: Sequence[Any],
    out_shape: Any,
) -> Any:
    """Run `kernel(*refs)` on a grid. All refs are whole arrays in memory, numbers int32 [1]."""
    # A deprecated backend: imported here, so that its removal breaks nothing else.
    from jax.experimental.pallas import triton

    values = (jnp.asarray(operand) for operand in operands)
    arrays = [value if value.ndim else value.astype(jnp.int32).reshape(1) for value in values]
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        interpret=implementation.interpreting(),
        compiler_params=triton.CompilerParams(num_warps=config.warps, num_stages=1),
    )(*arrays)


@dataclasses.dataclass(frozen=True)
class Block:
    """Rows of one program, all of one width. Scalars are values of the kernel."""

    layout: Layout
    width: Array  # int32
    top: Array  # uint32, the largest magnitude code
    levels: Levels
    class_rows: Array  # int32
    codes_start: Array  # int32, in 16-bit units of the message
    row: Array  # int32 [rows], within the class; the last row repeats where the block overhangs
    place: Array  # int32 [rows], within the chunk

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """All widths that a block of this layout can have."""
        return tuple(c.width for c in self.layout.classes)

    def when(self, bits: int, then: Callable, otherwise: Callable, operand: list) -> list:
        """Return `then(operand)` if the width has that plane of 4, 2 or 1 bits."""
        having = [bits in planes(width) for width in self.widths]
        if all(having):
            return then(operand)
        return (
            lax.cond((self.width & bits) != 0, then, otherwise, operand) if any(having) else operand
        )

    def plane(self, low: Index, bits: int, part: int) -> Array:
        """Return the places of slice `part` of a plane, in 16-bit units: int32 [rows, 16]."""
        start = self.codes_start + 16 * self.class_rows * low
        return (start + self.row * (16 * bits) + 16 * part)[:, None] + iota(16)[None, :]


def for_each_block(
    kernel: Callable,
    layout: Layout,
    config: Config,
    operands: Sequence[Array | int],
    out_shape: jax.ShapeDtypeStruct,
    chunks: int = 1,
) -> Array:
    """Run `kernel(block, *operand refs, out ref)` for the blocks of one or more chunks.

    The second axis of the grid counts chunks.
    """
    classes, levels = _tables(layout, config)

    def body(classes_ref, levels_ref, *refs):
        kernel(_locate(layout, config, classes_ref, levels_ref), *refs)

    blocks = sum(config.programs(c.rows) for c in layout.classes)
    return launch(body, (blocks, chunks), config, [classes, levels, *operands], out_shape)


def _tables(layout: Layout, config: Config) -> tuple[np.ndarray, np.ndarray]:
    classes, levels, block = [], [], 0
    for c in layout.classes:
        classes.append([c.width, c.first_row, c.rows, c.codes_start // 32, block])
        numbers = layout.quantizer.levels(c.width)
        levels.append(jax.tree.leaves(numbers))
        block += config.programs(c.rows)
    return np.array(classes, np.int32).reshape(-1), np.array(levels, np.float32).reshape(-1)


def _locate(layout: Layout, config: Config, classes_ref, levels_ref) -> Block:
    program, index, first_block = pl.program_id(0), jnp.int32(0), 0
    for c in layout.classes[:-1]:
        first_block += config.programs(c.rows)
        index = index + (program >= first_block).astype(jnp.int32)
    width, first_row, rows, codes_start, first = (
        classes_ref[index * _CLASS_FIELDS + i] for i in range(_CLASS_FIELDS)
    )
    names, structure = jax.tree.flatten(layout.quantizer.levels(2))
    numbers = [levels_ref[index * len(names) + i] for i in range(len(names))]
    levels = jax.tree.unflatten(structure, numbers)
    row = lax.min((program - first) * config.rows + iota(config.rows), rows - 1)
    return Block(
        layout=layout,
        width=width,
        top=jnp.asarray(top_code(levels)),
        levels=levels,
        class_rows=rows,
        codes_start=codes_start * 16,
        row=row,
        place=first_row + row,
    )


def to_lanes(by_group: Array) -> Array:
    """Reshape numbers of groups [rows, 32 / group_size] to broadcast to [rows, 32]."""
    groups = by_group.shape[1]
    if groups == 1:
        return by_group
    spread = jnp.broadcast_to(by_group[:, :, None], (*by_group.shape, LANES // groups))
    return spread.reshape(-1, LANES)


def merge_lanes(values: Array, count: int, bits: int | None = None) -> Array:
    """Merge `count` neighbors of uint32 [rows, m] into one word."""
    shifts = (iota(count) * (bits or 32 // count)).astype(U32)
    parts = values.reshape(values.shape[0], -1, count) << shifts[None, None, :]
    return jnp.sum(parts, axis=2, dtype=U32)


def split_lanes(words: Array, count: int, bits: int | None = None) -> Array:
    """Invert `merge_lanes`, except for the bits above: uint32 [rows, m * count]."""
    shifts = (iota(count) * (bits or 32 // count)).astype(U32)
    return (words[:, :, None] >> shifts[None, None, :]).reshape(words.shape[0], -1)


def in_every_byte(value: int) -> np.uint32:
    """Repeat a byte four times."""
    return np.uint32(value * 0x01010101)


def iota(count: int) -> Array:
    """Return int32 0 .. count - 1."""
    return lax.iota(jnp.int32, count)
