"""Time, bytes and error of all-reduces over a mesh, and whether workers get the same bits.

The devices of the mesh may belong to this process or to several joined by `jax.distributed`; then
all of them run the same calls in the same order.
"""

import dataclasses
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from dynamiq_jax._measurement.devices import AXIS, barrier, on_all_processes
from dynamiq_jax._measurement.gradients import worker_gradient
from dynamiq_jax._measurement.settings import Setting


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One setting at one size."""

    setting: str
    size: int  # float32 coordinates of every worker
    workers: int
    seconds: float  # wall time of one all-reduce: median over repeats, slowest process
    repeats: tuple[float, ...]  # seconds, all of them
    bytes_per_worker: int  # that wire_report says each worker sends
    bits: float  # on the wire per coordinate in one pass; 32 for float32
    vnmse: float  # against the exact sum in float64
    replicas_equal: bool  # all workers hold the same bits


class CompiledAllReduce:
    """A setting, compiled for trees of float32 arrays [workers, *shape], as `gradients` has."""

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
        jitted = jax.jit(mapped, in_shardings=(self.sharding, None))
        self._function = jitted.lower(gradients, np.uint32(0)).compile()

    def __call__(self, gradients: Any, seed: int) -> Any:
        """Sum gradients that are split over the axis; return the copies of all workers."""
        return jax.block_until_ready(self._function(gradients, np.uint32(seed)))

    def seconds(self, gradients: Any, seed: int) -> float:
        """Time one call, which starts on all processes at once."""
        barrier()
        start = time.perf_counter()
        self(gradients, seed)
        return time.perf_counter() - start


def measure(
    settings: Sequence[Setting], mesh: Mesh, size: int, *, repeats: int, done: Callable[[str], None]
) -> list[Measurement]:
    """Measure settings at one size, in turns so that a change of the machine's load meets all.

    `done` is called with a text after every compilation and every timed call.
    """
    gradients = make_gradients(mesh, size, seed=0)
    truth = exact_sum(mesh.size, size, seed=0)
    functions, found = [], []
    for setting in settings:
        functions.append(CompiledAllReduce(setting, mesh, gradients))
        result = functions[-1](gradients, 0)
        equal = len(np.unique(on_all_processes(checksums(result), np.uint32))) == 1
        found.append((relative_error(result, truth), equal))
        done(f"compiled {setting.name}")
    seconds = np.zeros((len(settings), repeats), np.float32)
    for repeat in range(repeats):
        for index, setting in enumerate(settings):
            seconds[index, repeat] = functions[index].seconds(gradients, 1 + repeat)
            done(f"timed {setting.name}")
    slowest = on_all_processes(seconds.reshape(-1).tolist(), np.float32).max(axis=0)
    times_of_each = slowest.reshape(seconds.shape).tolist()
    results = []
    for setting, times, (vnmse, equal) in zip(settings, times_of_each, found, strict=True):
        report = setting.wire_report(size, mesh.size)
        results.append(
            Measurement(
                setting=setting.name,
                size=size,
                workers=mesh.size,
                seconds=statistics.median(times),
                repeats=tuple(times),
                bytes_per_worker=report.bytes_per_worker,
                bits=report.bits,
                vnmse=vnmse,
                replicas_equal=equal,
            )
        )
    return results


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
