"""What passes between a method and a topology: a bucket in chunks, as many for each worker.

Two families of methods, one interface. A topology moves opaque payloads and asks a `ChunkCodec` for
three things: the first payload of a chunk, the payload after received partial sums have been added
(one in a ring, several in a butterfly or an all-to-all), and the values of the final payloads.
Methods that decode and re-encode at each hop do so in `hop`; for methods whose encoded form can be
summed directly `hop` is a sum of payloads (`SummedChunks`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import Array

Payload = Any  # pytree of arrays: what one chunk puts on the wire in one hop


class ChunkCodec(Protocol):
    """One bucket of one all-reduce on one worker, in as many chunks as the topology asks for."""

    def compress(self, chunk: Array, hop: Array | int) -> Payload:
        """Payload of the local values of a chunk."""

    def hop(self, payloads: tuple[Payload, ...], chunk: Array, hop: Array | int) -> Payload:
        """Payload of one or more received partial sums of a chunk plus the local values."""

    def decompress(self, payloads: Payload) -> Array:
        """Payloads of all chunks, stacked on a leading axis, to the sum: float32 [size]."""


@dataclasses.dataclass(frozen=True)
class SummedChunks:
    """Codec of methods whose encoded form can be summed: a hop adds the local payload to the
    received one.

    `encoded` is a pytree of arrays whose leading axis counts chunks; `decode` maps the summed tree
    of all chunks to float32 [size].
    """

    encoded: Payload
    decode: Callable[[Payload], Array]

    def compress(self, chunk: Array, hop: Array | int) -> Payload:
        """See `ChunkCodec`."""
        return jax.tree.map(lambda leaf: leaf[chunk], self.encoded)

    def hop(self, payloads: tuple[Payload, ...], chunk: Array, hop: Array | int) -> Payload:
        """See `ChunkCodec`."""
        local = self.compress(chunk, hop)
        return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), local, *payloads)

    def decompress(self, payloads: Payload) -> Array:
        """See `ChunkCodec`."""
        return self.decode(payloads)
