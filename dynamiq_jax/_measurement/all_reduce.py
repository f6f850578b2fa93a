"""Time and error of one all-reduce of made-up gradients over a mesh.

The devices of the mesh may belong to this process or to several joined by `jax.distributed`; then
all of them run the same calls in the same order.
"""

import time
import zlib

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from dynamiq_jax._measurement.devices import AXIS
from dynamiq_jax._measurement.gradients import worker_gradient
from dynamiq_jax._measurement.joining import barrier
from dynamiq_jax._measurement.settings import Setting


class CompiledAllReduce:
    """A compiled all-reduce of `gradients`, float32 [workers, size] split over the axis."""

    def __init__(self, setting: Setting, mesh: Mesh, gradients: Array):
        def local(gradient: Array, seed: Array) -> Array:
            return setting.all_reduce(gradient[0], AXIS, jax.random.key(seed))[None]

        # Each worker's own copy comes back, so that copies can be compared.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
        )
        self._gradients = gradients
        self._function = jax.jit(mapped).lower(gradients, np.uint32(0)).compile()

    def __call__(self, seed: int) -> Array:
        """Sum the gradients and wait for the copies of all workers, float32 [workers, size]."""
        return jax.block_until_ready(self._function(self._gradients, np.uint32(seed)))

    def seconds(self, seed: int) -> float:
        """Time one call, which starts on all processes at once."""
        barrier()
        start = time.perf_counter()
        self(seed)
        return time.perf_counter() - start


def make_gradients(mesh: Mesh, size: int, seed: int) -> Array:
    """Draw the gradients of all workers, float32 [workers, size], split over the axis."""
    sharding = NamedSharding(mesh, P(AXIS))

    def rows(index: tuple[slice, ...] | None) -> NDArray[np.float32]:
        first, last, _ = (index or (slice(None),))[0].indices(mesh.size)
        return np.stack([worker_gradient(worker, size, seed) for worker in range(first, last)])

    return jax.make_array_from_callback((mesh.size, size), sharding, rows)


def exact_sum(num_workers: int, size: int, seed: int) -> NDArray[np.float64]:
    """Sum the gradients of all workers, float64 [size], one after the other."""
    total = np.zeros(size)
    for worker in range(num_workers):
        total += worker_gradient(worker, size, seed)
    return total


def relative_error(estimate: Array, truth: NDArray[np.float64]) -> float:
    """Return the vNMSE of the first worker's copy that is on this process, in float64."""
    mine = np.asarray(estimate.addressable_shards[0].data, np.float64)[0]
    return float(np.sum((mine - truth) ** 2) / np.sum(truth**2))


def checksums(result: Array) -> list[int]:
    """Return the CRC-32 of every copy of the result on this process."""
    return [zlib.crc32(np.asarray(shard.data)) for shard in result.addressable_shards]
