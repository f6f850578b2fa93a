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
from dynamiq_jax._measurement.joining import on_all_processes
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
        functions.append(CompiledAllReduce(setting, mesh, gradients))
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
                setting=setting.name,
                size=size,
                workers=mesh.size,
                seconds=statistics.median(times),
                repeats=tuple(times),
                bytes_per_worker=report.bytes_per_worker,
                bits=32.0 if math.isnan(report.bits) else report.bits,
                vnmse=errors[index],
                replicas_equal=equal[index],
            )
        )
    return results
