"""Error, bytes and time of one setting on given gradients, with workers on virtual devices."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

import jax

from dynamiq_jax._measurement.gradient_files import Gradients, of_workers
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax._measurement.settings import Setting
from dynamiq_jax._measurement.simulate import Simulation, codec_ns

_COLUMNS = 1024  # of a made-up gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that settings of one comparison have in common."""

    steps: Mapping[str, Gradients]  # label of a training step to gradients
    seeds: int  # rounding seeds that errors are averaged over
    rate: float  # of the link that times are for, bits a second
    codec_ns: float | None  # codec of a worker for each coordinate; None: as measured

    def row(self, setting: Setting, workers: int, done: Callable[[str], None]) -> dict[str, Any]:
        """Simulate one setting on the first workers.

        Args:
          setting: how to sum.
          workers: number of workers.
          done: called with a text after compiling and after every step.

        Returns:
          A row for tables, plots and the JSON file.
        """
        name, at = setting.name, f"{workers} workers"
        chosen = {step: of_workers(tree, workers) for step, tree in self.steps.items()}
        first = next(iter(chosen.values()))
        shapes = {
            leaf: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
            for leaf, values in first.items()
        }
        report = setting.wire_report(shapes, workers)
        simulation = Simulation(setting, first)
        done(f"compiled {name}, {at}")
        simulated = {}
        for step, gradients in chosen.items():
            simulated[step] = simulation(gradients, range(self.seeds))
            done(f"{name}, {at}")
        size = sum(shape.size for shape in shapes.values())
        measured = codec_ns(min(each.seconds for each in simulated.values()), size, workers)
        codec = measured if self.codec_ns is None else self.codec_ns
        wire_seconds = 8 * report.bytes_per_worker / self.rate
        method, _, topology = name.rpartition(":")
        return {
            "setting": name,
            "method": method,
            "topology": topology,
            "workers": workers,
            "size": size,
            "bits": 8 * report.bytes_per_worker / (2 * (workers - 1) / workers * size),
            "bytes_per_worker": report.bytes_per_worker,
            "codec_ns": measured,  # of one core, for each coordinate
            "seconds": wire_seconds + 1e-9 * codec * size,  # on the link
            "replicas_equal": all(each.replicas_equal for each in simulated.values()),
            "steps": {step: dataclasses.asdict(each) for step, each in simulated.items()},
            "vnmse": geometric_mean(each.vnmse for each in simulated.values()),
            "relative": geometric_mean(each.relative for each in simulated.values()),
            "above_half": fmean(each.above_half for each in simulated.values()),
        }


def made_up(num_workers: int, size: int) -> dict[str, Gradients]:
    """Draw gradients of one step: a matrix of about `size` coordinates.

    Some methods take a gradient as more than a vector.
    """
    rows = max(1, size // _COLUMNS)
    drawn = worker_gradients(num_workers, rows * _COLUMNS, seed=0)
    return {"made up": {"gradient": drawn.reshape(num_workers, rows, _COLUMNS)}}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of the positive ones of several values; 0 if there is none."""
    positive = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else 0.0
