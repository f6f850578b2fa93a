"""Ring: reduce-scatter by n - 1 neighbour exchanges, then an all-gather of the compressed sums."""

import dataclasses

import jax
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.chunks import ChunkCodec, Payload
from dynamiq_jax.topologies.base import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Topology):
    """Bandwidth-optimal, n compressions on a coordinate's path.

    Chunk c starts at worker c + 1 and ends at worker c, which compresses the final sum. The gather
    forwards these bytes verbatim and every worker, the owner too, decodes the payload, so that all
    replicas hold the same bits.
    """

    def all_reduce(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Array:
        """See `Topology`."""
        worker = lax.axis_index(axis_name)
        to_next = [(source, (source + 1) % num_workers) for source in range(num_workers)]

        def step(hop: Array, payload: Payload) -> Payload:
            received = lax.ppermute(payload, axis_name, to_next)
            return codec.hop((received,), (worker - hop - 1) % num_workers, hop)

        first = codec.compress((worker - 1) % num_workers, 0)
        final = lax.fori_loop(1, num_workers, step, first)
        return codec.decompress(
            jax.tree.map(lambda leaf: compat.all_gather(leaf, axis_name), final)
        )

    def payloads_sent(self, num_workers: int) -> int:
        """See `Topology`."""
        return 2 * (num_workers - 1)
