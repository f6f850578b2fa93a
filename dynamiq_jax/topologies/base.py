"""What a topology is: how chunks travel. It moves payloads that it cannot read."""

import abc
import dataclasses

from jax import Array

from dynamiq_jax.chunks import ChunkCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology(abc.ABC):
    """How chunks travel between the workers of one axis."""

    @abc.abstractmethod
    def all_reduce(self, codec: ChunkCodec, axis_name: str, num_workers: int) -> Array:
        """Sum over the axis, float32 [size], the same bits on all workers."""

    @abc.abstractmethod
    def payloads_sent(self, num_workers: int) -> int:
        """Payloads of one chunk that each worker sends in one all-reduce."""

    def num_chunks(self, num_workers: int) -> int:
        """Chunks that a bucket is cut into: as many for each worker."""
        return num_workers
