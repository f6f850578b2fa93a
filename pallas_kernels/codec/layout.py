"""Shape of a bucket on the wire: chunks of rows, and the sections of a message."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels._jax.compat import override
from pallas_kernels._jax.shapes import Int32, Shaped, UInt8, UInt16
from pallas_kernels.codec.allocation import Allocation
from pallas_kernels.codec.bit_planes import UNIT
from pallas_kernels.codec.levels import (
    Levels,
    Spacing,
    TabulatedLevels,
    levels_of_rows,
    make_levels,
    position_table,
)
from pallas_kernels.codec.packing import MAX_WIDTH, SUPER_GROUP_SIZE
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

    def levels_of_widths(self) -> list[Levels]:
        """Return the levels of all widths from 0 on."""
        return [self.levels(width) for width in range(MAX_WIDTH + 1)]

    def level_table(self) -> tuple[np.ndarray, Any]:
        """Return the numbers of the levels of all widths, float32 [17, n], and their structure."""
        levels = self.levels_of_widths()
        numbers = np.array([jax.tree.leaves(one) for one in levels], np.float32)
        return numbers, jax.tree.structure(levels[0])

    def levels_of_rows(self, widths: Int32[Array, "rows"]) -> Levels:
        """Return the levels of rows of some widths, as columns [rows, 1]."""
        return levels_of_rows(self.levels_of_widths(), widths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TabulatedQuantizer(Quantizer):
    """A quantizer that only decodes, to the same bits on all hardware."""

    @override
    def levels_of_rows(self, widths: Array) -> Any:
        """Return positions in a table for rows of some widths, int32 [rows]."""
        tables = [position_table(w, self.spacing, self.gap_ratio) for w in range(MAX_WIDTH + 1)]
        starts = np.cumsum([0, *map(len, tables[:-1])]).astype(np.int32)
        return TabulatedLevels(jnp.concatenate(tables), jnp.asarray(starts)[widths][:, None])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Static description of the message of one chunk, the same for all chunks of a bucket."""

    size: int  # coordinates of the bucket, before padding
    num_chunks: int  # a multiple of the workers
    code_bits: float  # budget for the codes, per coordinate
    allocation: Allocation
    quantizer: Quantizer

    @property
    def rows_per_chunk(self) -> int:
        """Super-groups in a chunk, R."""
        return -(-self.size // (SUPER_GROUP_SIZE * self.num_chunks))

    @property
    def num_rows(self) -> int:
        """Super-groups in the padded bucket, n * R."""
        return self.num_chunks * self.rows_per_chunk

    @property
    def units(self) -> int:
        """Units of 32 bytes that the planes of a message take: a row takes one for each bit."""
        return int(self.code_bits * self.rows_per_chunk + 1e-6)

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
        return UNIT * self.units

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

    def solve(self, energies: Array) -> Array:
        """Solve for the widths of the rows of chunks; see `Allocation.solve`."""
        return self.allocation.solve(energies, self.units)

    def as_rows(self, flat: Shaped[Array, "{self.size}"]) -> Shaped[Array, "{self.num_rows} 256"]:
        """Pad a bucket with zeros to a matrix of rows."""
        padding = self.num_rows * SUPER_GROUP_SIZE - self.size
        return jnp.pad(flat, (0, padding)).reshape(self.num_rows, SUPER_GROUP_SIZE)

    def as_flat(self, rows: Shaped[Array, "{self.num_rows} 256"]) -> Shaped[Array, "{self.size}"]:
        """Invert `as_rows`."""
        return rows.reshape(-1)[: self.size]

    def message(
        self,
        planes: UInt8[Array, "{self.units} 32"],
        group_bytes: UInt8[Array, "{self.rows_per_chunk} {self.groups}"],
        super_bits: UInt16[Array, "{self.rows_per_chunk}"],
    ) -> UInt8[Array, "{self.payload_bytes}"]:
        """Join planes, group scales, and super-scales into one message."""
        parts = [planes, group_bytes, lax.bitcast_convert_type(super_bits, jnp.uint8)]
        message = jnp.concatenate([part.reshape(-1) for part in parts])
        return jnp.pad(message, (0, self.payload_bytes - message.size))

    def planes(
        self, payload: UInt8[Array, "*messages {self.payload_bytes}"]
    ) -> UInt8[Array, "*messages {self.units} 32"]:
        """Read the planes of messages."""
        planes = payload[..., : self.group_scales_start]
        return planes.reshape(*payload.shape[:-1], self.units, UNIT)

    def scales(
        self, payload: UInt8[Array, "*messages {self.payload_bytes}"]
    ) -> tuple[
        UInt8[Array, "*messages {self.rows_per_chunk} {self.groups}"],
        UInt16[Array, "*messages {self.rows_per_chunk}"],
    ]:
        """Read group scales and super-scales from messages."""
        rows = (*payload.shape[:-1], self.rows_per_chunk)
        group_bytes = payload[..., self.group_scales_start : self.super_scales_start]
        super_bytes = payload[..., self.super_scales_start : self.padding_start]
        super_bits = lax.bitcast_convert_type(super_bytes.reshape(*rows, 2), jnp.uint16)
        return group_bytes.reshape(*rows, self.groups), super_bits

    def with_scales(self, payload: Array, group_bytes: Array, super_bits: Array) -> Array:
        """Replace the scales of messages; the shapes are those that `scales` returns."""
        parts = [group_bytes, lax.bitcast_convert_type(super_bits, jnp.uint8)]
        scales = [part.reshape(*payload.shape[:-1], -1) for part in parts]
        section = slice(self.group_scales_start, self.padding_start)
        return payload.at[..., section].set(jnp.concatenate(scales, axis=-1))

    def with_scales_of(self, payload: Array, other: Array) -> Array:
        """Replace the scales of a message, of bytes or words, by those of another."""
        start = self.group_scales_start // other.dtype.itemsize
        return jnp.concatenate([payload[:start], other[start:]])
