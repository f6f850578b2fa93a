"""Base of block quantizers: every block by itself, decoded and encoded again at every hop."""

import abc
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._core import RecodedChunks, WireCost
from dynamiq_jax.methods._base import Call, ChunkedMethod
from dynamiq_jax.methods._block_format import BlockFormat, rows_per_chunk
from pallas_kernels.codec import SUPER_GROUP_SIZE, offsets
from pallas_kernels.compat import match_varying, override
from pallas_kernels.operands import Index
from pallas_kernels.row_blocks import for_each_block


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseMethod(ChunkedMethod):
    """A method whose code of a block depends on the block alone, and perhaps on noise. It sends no
    statistics.
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
        """Encode float32 [rows, 256], with noise of that shape in (0, 1) or None, to the arrays
        that `BlockFormat.pack` takes.
        """

    @abc.abstractmethod
    def decode_rows(self, codes: Array, *sides: Array) -> Array:
        """Decode the arrays that `BlockFormat.unpack` returns to float32 [rows, 256]."""

    @override
    def wire_cost(self, call: Call) -> WireCost:
        rows = rows_per_chunk(call.size, call.num_chunks)
        return WireCost(payload_bytes=rows * self.format.row_bytes)

    @override
    def bind(self, values: Array, call: Call, key: Array) -> RecodedChunks:
        seed = jax.random.bits(key, (2,), jnp.uint32) if self.is_stochastic else None
        return RecodedChunks(
            local=call.local_chunks(values, SUPER_GROUP_SIZE),
            encode=functools.partial(self._encode, seed),
            decode=lambda payload, _: self.decode_rows(*self.format.unpack(payload)).reshape(-1),
        )

    def _encode(self, seed: Array | None, values: Array, chunk: Array, turn: Index) -> Array:
        rows_before = jnp.asarray(chunk).astype(jnp.uint32)
        rows_before = rows_before * np.uint32(values.size // SUPER_GROUP_SIZE)

        def encode(rows: Array, first: Index) -> tuple[Array, ...]:
            if seed is None:
                return self.encode_rows(rows, None)
            ids = rows_before + jnp.asarray(first).astype(jnp.uint32)
            ids = ids + jnp.arange(rows.shape[0], dtype=jnp.uint32)
            return self.encode_rows(rows, jnp.asarray(offsets(ids, turn, seed, "independent")))

        return encode_message(self.format, values, encode)


def encode_message(
    form: BlockFormat, values: Array, encode: Callable[[Array, Index], tuple[Array, ...]]
) -> Array:
    """Encode values to a message, some rows after the other.

    Codes wait in memory before they are packed. If fused with the packing, XLA:CPU rounds again for
    every plane, which takes MXFP6 six times as long.

    Args:
      form: format of the message.
      values: float32 [256 rows].
      encode: function of rows [count, 256] and the index of the first to the arrays that
        `form.pack` takes.
    """
    rows = values.reshape(-1, SUPER_GROUP_SIZE)

    def step(first: Index, count: int, parts: tuple[Array, ...]) -> tuple[Array, ...]:
        encoded = encode(lax.dynamic_slice_in_dim(rows, first, count), first)
        return tuple(
            lax.dynamic_update_slice_in_dim(part, block, first, axis=0)
            for part, block in zip(parts, encoded, strict=True)
        )

    empty = match_varying(form.zeros(rows.shape[0]), values)
    return form.pack(*for_each_block(rows.shape[0], step, empty))
