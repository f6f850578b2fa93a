"""Static shape of a bucket on the wire: how many rows of which width each chunk has, and where they
lie in its message.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.codec import packing
from dynamiq_jax.codec.levels import Levels, Spacing, levels_of_rows, make_levels
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE, row_bytes
from dynamiq_jax.codec.rounding import Rounding

ALIGNMENT = 16  # bytes: the widest load of a GPU


@dataclasses.dataclass(frozen=True)
class WidthClass:
    """Rows of one width inside a chunk. Offsets in rows; `codes_start` in bytes of the message."""

    width: int
    rows: int
    first_row: int
    codes_start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything static about the message of one chunk; all chunks of a bucket share it.

    Invariants: `classes` are disjoint, in order and cover `rows_per_chunk`; `payload_bytes` is the
      whole message.
    """

    size: int  # coordinates of the bucket, before padding
    num_chunks: int  # one or more for each worker
    group_size: int  # coordinates that share a group scale
    spacing: Spacing
    gap_ratio: float
    rounding: Rounding
    classes: tuple[WidthClass, ...]  # widest first, none empty

    @property
    def rows_per_chunk(self) -> int:
        """Super-groups in a chunk, R."""
        return self.classes[-1].first_row + self.classes[-1].rows

    @property
    def num_rows(self) -> int:
        """Super-groups in the padded bucket, n * R."""
        return self.num_chunks * self.rows_per_chunk

    @property
    def groups(self) -> int:
        """Group scales in a row."""
        return SUPER_GROUP_SIZE // self.group_size

    @property
    def group_scales_start(self) -> int:
        """Byte of the message where the group scales start."""
        last = self.classes[-1]
        return last.codes_start + last.rows * row_bytes(last.width)

    @property
    def super_scales_start(self) -> int:
        """Byte of the message where the super-scales start."""
        return self.group_scales_start + self.rows_per_chunk * self.groups

    @property
    def padding_start(self) -> int:
        """Byte of the message where the zeros at its end start."""
        return self.super_scales_start + 2 * self.rows_per_chunk

    @property
    def payload_bytes(self) -> int:
        """Bytes of one message, padded so that messages that lie one after the other are all
        aligned.
        """
        return -(-self.padding_start // ALIGNMENT) * ALIGNMENT

    def as_rows(self, flat: Array) -> Array:
        """Pads a bucket [size] with zeros to a matrix [num_rows, 256]."""
        padding = self.num_rows * SUPER_GROUP_SIZE - self.size
        return jnp.pad(flat, (0, padding)).reshape(self.num_rows, SUPER_GROUP_SIZE)

    def as_flat(self, rows: Array) -> Array:
        """Inverse of `as_rows`."""
        return rows.reshape(-1)[: self.size]

    def levels(self, first: Array | int, count: int) -> Levels:
        """Levels of the rows at places `first .. first + count` of a chunk, as columns
        [count, 1].
        """
        places = first + jnp.arange(count, dtype=jnp.int32)
        later_classes = np.array([c.first_row for c in self.classes[1:]], np.int32)
        class_of_row = jnp.sum((places[:, None] >= later_classes).astype(jnp.int32), axis=1)
        levels = [make_levels(c.width, self.spacing, self.gap_ratio) for c in self.classes]
        return levels_of_rows(levels, class_of_row)

    def pack(self, codes: Array, group_bytes: Array, super_bits: Array) -> Array:
        """Joins codes uint16 [R, 256], group scales uint8 [R, groups] and super-scales uint16 [R]
        into one uint8 message.
        """
        parts: list[Array] = []
        for c in self.classes:
            parts += packing.pack(codes[c.first_row : c.first_row + c.rows], c.width)
        parts += [group_bytes, lax.bitcast_convert_type(super_bits, jnp.uint8)]
        message = jnp.concatenate([part.reshape(-1) for part in parts])
        return jnp.pad(message, (0, self.payload_bytes - message.size))

    def scales(self, payload: Array) -> tuple[Array, Array]:
        """Group scales uint8 [..., R, groups] and super-scales uint16 [..., R] of messages uint8
        [..., payload_bytes].
        """
        batch = payload.shape[:-1]
        group_bytes = payload[..., self.group_scales_start : self.super_scales_start]
        super_bytes = payload[..., self.super_scales_start : self.padding_start]
        return (
            group_bytes.reshape(*batch, self.rows_per_chunk, self.groups),
            lax.bitcast_convert_type(
                super_bytes.reshape(*batch, self.rows_per_chunk, 2), jnp.uint16
            ),
        )

    def with_scales(self, payload: Array, group_bytes: Array, super_bits: Array) -> Array:
        """The same messages with other scales, of the shapes that `scales` returns."""
        batch = payload.shape[:-1]
        super_bytes = lax.bitcast_convert_type(super_bits, jnp.uint8)
        scales = [part.reshape(*batch, -1) for part in (group_bytes, super_bytes)]
        section = slice(self.group_scales_start, self.padding_start)
        return payload.at[..., section].set(jnp.concatenate(scales, axis=-1))

    def unpack(self, payload: Array) -> tuple[Array, Array, Array]:
        """Inverse of `pack`."""
        codes = []
        for c in self.classes:
            planes, start = [], c.codes_start
            for bits in packing.planes(c.width):
                stop = start + c.rows * row_bytes(bits)
                planes.append(payload[start:stop].reshape(c.rows, row_bytes(bits)))
                start = stop
            codes.append(packing.unpack(tuple(planes), c.rows, c.width))
        joined = jnp.concatenate(codes).reshape(self.rows_per_chunk, SUPER_GROUP_SIZE)
        return joined, *self.scales(payload)


def make_layout(
    size: int,
    num_chunks: int,
    *,
    fractions: tuple[tuple[int, float], ...],
    group_size: int,
    spacing: Spacing,
    gap_ratio: float,
    rounding: Rounding,
) -> Layout:
    """Layout of a bucket of `size` coordinates whose rows take widths in the given fractions.

    Args:
      size: coordinates, at least 1.
      num_chunks: chunks of the bucket, as many for each worker.
      fractions: (width, share of the rows), widest first, shares adding up to 1.
      group_size: coordinates that share a group scale.
      spacing: how the gaps between levels widen.
      gap_ratio: the widest gap over the narrowest.
      rounding: kind of rounding offsets.
    """
    num_rows = -(-size // SUPER_GROUP_SIZE)
    rows_per_chunk = -(-num_rows // num_chunks)
    classes, first_row, codes_start, cumulative = [], 0, 0, 0.0
    for width, fraction in fractions:
        cumulative += fraction
        is_last = width == fractions[-1][0]
        rows = (rows_per_chunk if is_last else round(cumulative * rows_per_chunk)) - first_row
        if rows > 0:
            classes.append(WidthClass(width, rows, first_row, codes_start))
            first_row += rows
            codes_start += rows * row_bytes(width)
    return Layout(
        size=size,
        num_chunks=num_chunks,
        group_size=group_size,
        spacing=spacing,
        gap_ratio=gap_ratio,
        rounding=rounding,
        classes=tuple(classes),
    )
