"""One all-reduce over the axis of a mesh: how long it takes, what it sends, how far off it is.

The devices of the mesh may belong to this process or to several joined by `jax.distributed`; then
all of them run the same calls in the same order.
"""

import dataclasses
import math
import platform
import statistics
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.gradients import worker_gradient
from dynamiq_jax._workshop.settings import Setting

AXIS = "workers"
_MAX_SEED = 2**31 - 1  # repeats count on from it, and all are uint32


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

    @property
    def bandwidth(self) -> float:
        """Bytes of the float32 gradient that are reduced in a second ("algorithm bandwidth")."""
        return 4 * self.size / self.seconds


class AllReduce:
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
        """The sum as every worker has it, float32 [workers, size]; ready when this returns."""
        return jax.block_until_ready(self._function(self._gradients, np.uint32(seed)))

    def seconds(self, seed: int) -> float:
        """Wall time of one call, which starts on all processes at once."""
        barrier()
        start = time.perf_counter()
        self(seed)
        return time.perf_counter() - start


def barrier() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("dynamiq_jax._workshop.measure")


def check_seed(seed: int) -> None:
    """Raises CommandError for a --seed that `worker_gradient` does not take."""
    if not 0 <= seed <= _MAX_SEED:
        raise CommandError(f"--seed is {seed}: give 0 to {_MAX_SEED}.")


def workers_per_machine(mesh: Mesh) -> int:
    """Most workers that share the cores of one machine: 1 where each has a device of its own."""
    if mesh.devices.flat[0].platform != "cpu":
        return 1
    name = zlib.crc32(platform.node().encode())
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    machines, workers = on_all_processes([name, here], np.uint32).T
    return int(max(workers[machines == machine].sum() for machine in machines))


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The devices as the workers of one axis."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def make_gradients(mesh: Mesh, size: int, seed: int) -> Array:
    """What every worker contributes, float32 [workers, size], split over the axis."""
    sharding = NamedSharding(mesh, P(AXIS))

    def rows(index: tuple[slice, ...] | None) -> NDArray[np.float32]:
        first, last, _ = (index or (slice(None),))[0].indices(mesh.size)
        return np.stack([worker_gradient(worker, size, seed) for worker in range(first, last)])

    return jax.make_array_from_callback((mesh.size, size), sharding, rows)


def exact_sum(num_workers: int, size: int, seed: int) -> NDArray[np.float64]:
    """Sum of all workers' gradients, float64 [size]."""
    total = np.zeros(size)
    for worker in range(num_workers):
        total += worker_gradient(worker, size, seed)
    return total


def relative_error(estimate: Array, truth: NDArray[np.float64]) -> float:
    """vNMSE of the first worker's copy that is on this process, in float64."""
    mine = np.asarray(estimate.addressable_shards[0].data, np.float64)[0]
    return float(np.sum((mine - truth) ** 2) / np.sum(truth**2))


def checksums(result: Array) -> list[int]:
    """CRC-32 of every copy of the result on this process."""
    return [zlib.crc32(np.asarray(shard.data)) for shard in result.addressable_shards]


def on_all_processes(values: Sequence[float], dtype: Any) -> NDArray[Any]:
    """As many numbers from each process, [processes, len(values)]."""
    local = np.asarray(values, dtype)
    return np.asarray(multihost_utils.process_allgather(local)).reshape(-1, local.size)


def measure(
    settings: Sequence[Setting], mesh: Mesh, size: int, *, repeats: int, seed: int, done: Any
) -> list[Measurement]:
    """Measures settings at one size, in turns so that a change of the machine's load meets all.

    Args:
      settings: what to measure.
      mesh: the workers.
      size: float32 coordinates of every worker.
      repeats: timed calls of each setting.
      seed: chooses gradients and rounding.
      done: called with a text after every compilation and every timed call.
    """
    gradients = make_gradients(mesh, size, seed)
    truth = exact_sum(mesh.size, size, seed)
    functions, errors, equal = [], [], []
    for setting in settings:
        functions.append(AllReduce(setting, mesh, gradients))
        result = functions[-1](seed)
        errors.append(relative_error(result, truth))
        equal.append(len(np.unique(on_all_processes(checksums(result), np.uint32))) == 1)
        done(f"compiled {setting.name}")
    seconds: list[list[float]] = [[] for _ in settings]
    for repeat in range(repeats):
        for setting, function, times in zip(settings, functions, seconds, strict=True):
            times.append(function.seconds(seed + 1 + repeat))
            done(f"timed {setting.name}")
    slowest = on_all_processes([t for times in seconds for t in times], np.float32).max(axis=0)
    results = []
    for index, setting in enumerate(settings):
        report = setting.wire_report(size, mesh.size)
        times = [float(t) for t in slowest.reshape(len(settings), repeats)[index]]
        results.append(
            Measurement(
                setting.name,
                size,
                mesh.size,
                statistics.median(times),
                tuple(times),
                report.bytes_per_worker,
                32.0 if math.isnan(report.bits) else report.bits,
                errors[index],
                equal[index],
            )
        )
    return results
