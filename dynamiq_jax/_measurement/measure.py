"""Time, bytes and error of several settings at one size, measured in turns."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
from jax.sharding import Mesh

from dynamiq_jax._measurement.all_reduce import (
    CompiledAllReduce,
    checksums,
    exact_sum,
    make_gradients,
    relative_error,
)
from dynamiq_jax._measurement.devices import on_all_processes
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

    @property
    def bandwidth(self) -> float:
        """Bytes of the float32 gradient that are reduced in a second ("algorithm bandwidth")."""
        return 4 * self.size / self.seconds


def measure(
    settings: Sequence[Setting],
    mesh: Mesh,
    size: int,
    *,
    repeats: int,
    seed: int,
    done: Callable[[str], None],
) -> list[Measurement]:
    """Measure settings at one size, in turns so that a change of the machine's load meets all.

    `seed` chooses gradients and rounding. `done` is called with a text after every compilation and
    every timed call.
    """
    gradients = make_gradients(mesh, size, seed)
    truth = exact_sum(mesh.size, size, seed)
    functions, found = [], []
    for setting in settings:
        functions.append(CompiledAllReduce(setting, mesh, gradients))
        result = functions[-1](gradients, seed)
        equal = len(np.unique(on_all_processes(checksums(result), np.uint32))) == 1
        found.append((relative_error(result, truth), equal))
        done(f"compiled {setting.name}")
    seconds = np.zeros((len(settings), repeats), np.float32)
    for repeat in range(repeats):
        for index, setting in enumerate(settings):
            seconds[index, repeat] = functions[index].seconds(gradients, seed + 1 + repeat)
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
                bits=32.0 if math.isnan(report.bits) else report.bits,
                vnmse=vnmse,
                replicas_equal=equal,
            )
        )
    return results
