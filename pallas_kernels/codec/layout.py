"""Shape of a bucket on the wire: rows of each width, and their places in a message."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.codec import packing
from pallas_kernels.codec.levels import Levels, Spacing, levels_of_rows, make_levels
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE, row_bytes
from pallas_kernels.codec.rounding import Rounding

ALIGNMENT = 16  # bytes: the widest load of a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Quantization of rows, for all widths."""

    group_size: int  # coordinates that share a group scale
    spacing: Spacing  # how the gaps between levels widen
    gap_ratio: float  # the widest gap over the narrowest
    rounding: Rounding  # kind of rounding offsets

    def levels(self, width: int) -> Levels:
        """Return the levels of a width."""
        return make_levels(width, self.spacing, self.gap_ratio)


@dataclasses.dataclass(frozen=True)
class WidthClass:
    """Rows of one width inside a chunk. Offsets in rows; `codes_start` in bytes of the message."""

    width: int
    rows: int
    first_row: int
    codes_start: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Static description of the message of one chunk, the same for all chunks of a bucket.

    Invariants: `classes` are disjoint, in order and cover `rows_per_chunk`; `payload_bytes` is the
      whole message.
    """

    size: int  # coordinates of the bucket, before padding
    num_chunks: int  # a multiple of the workers
    quantizer: Quantizer
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
    def group_size(self) -> int:
        """Coordinates that share a group scale."""
        return self.quantizer.group_size

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
        """Bytes of one message, padded so that consecutive messages are all aligned."""
        return -(-self.padding_start // ALIGNMENT) * ALIGNMENT

    def as_rows(self, flat: Array) -> Array:
        """Pad a bucket [size] with zeros to a matrix [num_rows, 256]."""
        padding = self.num_rows * SUPER_GROUP_SIZE - self.size
        return jnp.pad(flat, (0, padding)).reshape(self.num_rows, SUPER_GROUP_SIZE)

    def as_flat(self, rows: Array) -> Array:
        """Invert `as_rows`."""
        return rows.reshape(-1)[: self.size]

    def levels(self, first: Array | int, count: int) -> Levels:
        """Return the levels at places `first .. first + count` of a chunk, as [count, 1]."""
        places = first + jnp.arange(count, dtype=jnp.int32)
        later_classes = np.array([c.first_row for c in self.classes[1:]], np.int32)
        class_of_row = jnp.sum((places[:, None] >= later_classes).astype(jnp.int32), axis=1)
        return levels_of_rows([self.quantizer.levels(c.width) for c in self.classes], class_of_row)

    def pack(self, codes: Array, group_bytes: Array, super_bits: Array) -> Array:
        """Join codes, group scales and super-scales into one message, uint8 [payload_bytes].

        They are uint16 [R, 256], uint8 [R, groups] and uint16 [R].
        """
        parts: list[Array] = []
        for c in self.classes:
            parts += packing.pack(codes[c.first_row : c.first_row + c.rows], c.width)
        parts += [group_bytes, lax.bitcast_convert_type(super_bits, jnp.uint8)]
        message = jnp.concatenate([part.reshape(-1) for part in parts])
        return jnp.pad(message, (0, self.payload_bytes - message.size))

    def unpack(self, payload: Array) -> tuple[Array, Array, Array]:
        """Invert `pack`."""
        codes = []
        for c in self.classes:
            section = payload[c.codes_start : c.codes_start + c.rows * row_bytes(c.width)]
            codes.append(packing.unpack(section, c.rows, c.width))
        joined = jnp.concatenate(codes).reshape(self.rows_per_chunk, SUPER_GROUP_SIZE)
        return joined, *self.scales(payload)

    def scales(self, payload: Array) -> tuple[Array, Array]:
        """Read group scales and super-scales from messages, uint8 [..., payload_bytes].

        They are uint8 [..., R, groups] and uint16 [..., R].
        """
        rows = (*payload.shape[:-1], self.rows_per_chunk)
        group_bytes = payload[..., self.group_scales_start : self.super_scales_start]
        super_bytes = payload[..., self.super_scales_start : self.padding_start]
        super_bits = lax.bitcast_convert_type(super_bytes.reshape(*rows, 2), jnp.uint16)
        return group_bytes.reshape(*rows, self.groups), super_bits

    def with_scales(self, payload: Array, group_bytes: Array, super_bits: Array) -> Array:
        """Replace the scales of messages; the shapes are those that `scales` returns."""
        batch = payload.shape[:-1]
        super_bytes = lax.bitcast_convert_type(super_bits, jnp.uint8)
        scales = [part.reshape(*batch, -1) for part in (group_bytes, super_bytes)]
        section = slice(self.group_scales_start, self.padding_start)
        return payload.at[..., section].set(jnp.concatenate(scales, axis=-1))


def make_layout(
    size: int, num_chunks: int, fractions: tuple[tuple[int, float], ...], quantizer: Quantizer
) -> Layout:
    """Lay out a bucket whose rows take widths in the given fractions.

    Of R rows in a chunk, the classes up to a width end at row round(f R), where f is the sum of
    their fractions and halves go to the even number.

    Args:
      size: coordinates of the bucket, at least 1.
      num_chunks: chunks of the bucket, the same number for each worker.
      fractions: (width, share of the rows), widest first, shares adding up to 1.
      quantizer: group size, levels and rounding of the rows.
    """
    rows_per_chunk = -(-size // (SUPER_GROUP_SIZE * num_chunks))
    classes, first_row, codes_start, cumulative = [], 0, 0, 0.0
    for width, fraction in fractions:
        cumulative += fraction
        is_last = width == fractions[-1][0]
        rows = (rows_per_chunk if is_last else round(cumulative * rows_per_chunk)) - first_row
        if rows > 0:
            classes.append(WidthClass(width, rows, first_row, codes_start))
            first_row += rows
            codes_start += rows * row_bytes(width)
    return Layout(size=size, num_chunks=num_chunks, quantizer=quantizer, classes=tuple(classes))
