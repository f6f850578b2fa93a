"""One all-reduce over a mesh, compiled: sums, times, and whether workers get the same bits.

The devices of the mesh may belong to this process or to several joined by `jax.distributed`; then
all of them run the same calls in the same order.
"""

import time
import zlib
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from dynamiq_jax._measurement.devices import AXIS, barrier
from dynamiq_jax._measurement.gradients import worker_gradient
from dynamiq_jax._measurement.settings import Setting


class CompiledAllReduce:
    """A setting, compiled for gradients of some shapes.

    Args:
      setting: how to sum.
      mesh: the workers.
      gradients: a tree of float32 arrays [workers, *shape].
    """

    def __init__(self, setting: Setting, mesh: Mesh, gradients: Any):
        def local(tree: Any, seed: Array) -> Any:
            mine = jax.tree.map(lambda leaf: leaf[0], tree)
            sums = setting.all_reduce(mine, AXIS, jax.random.key(seed))
            return jax.tree.map(lambda leaf: leaf[None], sums)

        # Each worker's own copy comes back, so that copies can be compared.
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
        )
        self.sharding = NamedSharding(mesh, P(AXIS))
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding),
            gradients,
        )
        self._function = jax.jit(mapped).lower(shapes, np.uint32(0)).compile()

    def __call__(self, gradients: Any, seed: int) -> Any:
        """Sum gradients that are split over the axis; return the copies of all workers."""
        return jax.block_until_ready(self._function(gradients, np.uint32(seed)))

    def seconds(self, gradients: Any, seed: int) -> float:
        """Time one call, which starts on all processes at once."""
        barrier()
        start = time.perf_counter()
        self(gradients, seed)
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
