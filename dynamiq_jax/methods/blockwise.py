"""What block quantizers share: every block by itself, decoded and encoded again at every hop."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.chunks import RecodedChunks, WireCost
from dynamiq_jax.codec.blocks import BlockFormat, as_row_chunks
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE
from dynamiq_jax.codec.rounding import offsets
from dynamiq_jax.methods.base import ChunkedMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseMethod(ChunkedMethod):
    """A method whose code of a block depends on nothing but the block, and maybe on noise. No
    statistics travel.
    """

    @property
    @abc.abstractmethod
    def format(self) -> BlockFormat:
        """Bytes of a row."""

    @property
    def is_stochastic(self) -> bool:
        """Whether `encode_rows` takes noise."""
        return False

    @abc.abstractmethod
    def encode_rows(self, rows: Array, noise: Array | None) -> tuple[Array, ...]:
        """float32 [rows, 256], and noise of that shape in (0, 1) or None, to what
        `BlockFormat.pack` takes.
        """

    @abc.abstractmethod
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        """What `BlockFormat.unpack` gives to float32 [rows, 256]."""

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        """See `Method`. Chunks are whole rows of 256."""
        payload_bytes = self.format.payload_bytes(size, num_chunks)
        return WireCost(payload_bytes=payload_bytes, statistics_bytes=0)

    def bind(
        self,
        flat: Array,
        axis_name: str,
        num_workers: int,
        num_chunks: int,
        key: Array,
        *,
        consecutive: bool = False,
    ) -> RecodedChunks:
        """See `ChunkedMethod`."""
        return self._chunks(key, values=as_row_chunks(flat, num_chunks), size=flat.size)

    def bind_part(self, part: Array, axis_name: str, num_workers: int, key: Array) -> RecodedChunks:
        """See `ChunkedMethod`."""
        first = lax.axis_index(axis_name)
        return self._chunks(key, values=part[None], size=num_workers * part.size, first=first)

    def _chunks(self, key: Array, **held: Any) -> RecodedChunks:
        seed = jax.random.bits(key, (2,), jnp.uint32) if self.is_stochastic else None
        return RecodedChunks(
            encode=functools.partial(self._encode, seed), decode=self._decode, **held
        )

    def _encode(self, seed: Array | None, values: Array, chunk: Array, turn: Array | int) -> Array:
        rows = values.reshape(-1, SUPER_GROUP_SIZE)
        noise = None
        if seed is not None:
            count = rows.shape[0]
            first = jnp.asarray(chunk).astype(jnp.uint32) * np.uint32(count)
            row_ids = first + jnp.arange(count, dtype=jnp.uint32)
            noise = jnp.asarray(offsets(row_ids, turn, seed, "independent"))
        return self.format.pack(*self.encode_rows(rows, noise))

    def _decode(self, payload: Array, chunk: Array) -> Array:
        return self.decode_rows(*self.format.unpack(payload)).reshape(-1)
