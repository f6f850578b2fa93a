"""Latencies of micro-batches, made up or from a file, and predictions for a compute threshold."""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dynamiq_research.drop_compute.law import StragglerLaw
from dynamiq_research.drop_compute.thresholds import (
    Latencies,
    ThresholdEffect,
    choose_threshold,
    effect_of_threshold,
)

Noise = Literal["normal", "lognormal", "exponential"]

_SWEPT = 40  # thresholds of a plot
_COLUMNS = ("step", "worker", "micro_batch", "seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeUp:
    """Latencies that are independent of each other."""

    noise: Noise
    workers: int
    micro_batches: int
    mean: float  # seconds of a micro-batch
    deviation: float  # standard deviation, as a share of the mean
    rest: float  # seconds of a step after the accumulation

    def draw(self, steps: int, seed: int) -> Latencies:
        """Draw latencies of some steps.

        Normal latencies are cut at zero. The others are a constant and a random delay, which is
        exponential, or lognormal with the sigma of 1 that the paper has.

        Args:
          steps: number of steps.
          seed: seed of the random numbers.

        Raises:
          ValueError: a deviation for which some latencies would be negative.
        """
        shape = (steps, self.workers, self.micro_batches)
        random = np.random.default_rng(seed)
        if self.noise == "normal":
            relative = np.maximum(random.normal(1, self.deviation, shape), 0)
        else:
            lognormal = self.noise == "lognormal"
            delays = random.lognormal(-0.5, 1, shape) if lognormal else random.exponential(1, shape)
            share = self.deviation / (math.sqrt(math.e - 1) if lognormal else 1)  # of the delays
            if share > 1:
                raise ValueError(
                    f"deviation={self.deviation!r} makes latencies negative. Give at most "
                    f"{self.deviation / share:.3g} with {self.noise} noise."
                )
            relative = 1 - share + share * delays
        return Latencies(times=self.mean * relative, rest=np.full(steps, self.rest))


def read_latencies(path: Path, rest: float) -> Latencies:
    """Read latencies from a file.

    Args:
      path: .npz with `times` [steps, workers, micro_batches] in seconds, and maybe `rest` [steps];
        or .csv with a header and the columns step, worker, micro_batch and seconds, which count
        from any number, one row for every micro-batch.
      rest: seconds of the rest of a step, where the file has none.

    Raises:
      ValueError: the file cannot be read, or holds other arrays or columns.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                saved = dict(arrays)
            if "times" not in saved:
                raise ValueError(f"it has the arrays {sorted(saved)}, but no `times`")
            times, rests = saved["times"], saved.get("rest", rest)
        elif path.suffix == ".csv":
            times, rests = _table(np.genfromtxt(path, delimiter=",", names=True)), rest
        else:
            raise ValueError("its name ends in neither .npz nor .csv")
        effect_of_threshold(times, rests, math.inf)  # checks shapes and values
    except (OSError, ValueError) as error:
        raise ValueError(f"latencies={str(path)!r}: {error}") from None
    return Latencies(np.asarray(times), np.broadcast_to(rests, len(times)))


def _table(rows: Any) -> np.ndarray:
    if rows.dtype.names != _COLUMNS:
        raise ValueError(f"its columns are {rows.dtype.names}, not {_COLUMNS}")
    where, shape = [], []
    for name in _COLUMNS[:3]:
        values, index = np.unique(rows[name], return_inverse=True)
        where.append(index)
        shape.append(len(values))
    times = np.full(shape, np.nan)
    times[tuple(where)] = rows["seconds"]
    if np.isnan(times).any() or rows.size != times.size:
        raise ValueError(
            f"it has {rows.size} rows of numbers for {shape[0]} steps x {shape[1]} workers x "
            f"{shape[2]} micro-batches: give each of them once"
        )
    return times


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdPrediction:
    """Predicted gain of a compute threshold."""

    chosen: ThresholdEffect  # on the steps that the threshold was chosen from
    held_out: ThresholdEffect  # on the other steps
    cut: ThresholdEffect  # on these, if micro-batches were cut off at it, as in the paper
    # Speed-up by the law for normal latencies; None for one worker, or other rules than the law's.
    law: float | None
    cut_law: float | None  # and by that of the paper, with micro-batches cut off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule by which workers stop, and the limit of a threshold."""

    max_drop: float = 0.1
    min_done: int = 1
    in_flight: int = 0

    def effect(self, latencies: Latencies, threshold: float) -> ThresholdEffect:
        """Return the effect of a threshold on a table."""
        return effect_of_threshold(
            *latencies, threshold, min_done=self.min_done, in_flight=self.in_flight
        )

    def law(self, latencies: Latencies) -> StragglerLaw | None:
        """Return the law for these latencies, if it is that of this rule."""
        return law_of(latencies) if (self.min_done, self.in_flight) == (1, 0) else None


def predict(latencies: Latencies, rule: Rule) -> ThresholdPrediction:
    """Choose a threshold on the first half of the steps, and replay the other half with it."""
    first, other = split_in_half(latencies)
    chosen = choose_threshold(*first, **dataclasses.asdict(rule))
    return ThresholdPrediction(
        chosen=chosen,
        held_out=rule.effect(other, chosen.threshold),
        cut=effect_of_threshold(*other, chosen.threshold, cut=True),
        law=_speedup(rule.law(first), chosen.threshold),
        cut_law=_speedup(law_of(first), chosen.threshold, cut=True),
    )


def _speedup(law: StragglerLaw | None, threshold: float, *, cut: bool = False) -> float | None:
    return None if law is None else law.speedup(threshold, cut=cut)


def split_in_half(latencies: Latencies) -> tuple[Latencies, Latencies]:
    """Split the steps of a table into those to choose from, and those to check with.

    Raises:
      ValueError: a table of one step.
    """
    steps = len(latencies.times)
    if steps < 2:
        raise ValueError(f"latencies has {steps} step. Give at least 2, to check with a half.")
    middle = steps // 2
    return Latencies(*(a[:middle] for a in latencies)), Latencies(*(a[middle:] for a in latencies))


def law_of(latencies: Latencies) -> StragglerLaw | None:
    """Return the law for normal latencies of the same moments; None without several workers."""
    times = latencies.times
    if times.shape[1] < 2 or not times.std() > 0:
        return None
    return StragglerLaw(
        mean=float(times.mean()),
        deviation=float(times.std()),
        workers=times.shape[1],
        micro_batches=times.shape[2],
        rest=float(latencies.rest.mean()),
    )


def sweep(latencies: Latencies, rule: Rule) -> list[dict[str, float | None]]:
    """Return speed-ups, drop rates and laws at thresholds over the whole range of a table."""
    elapsed = latencies.times.cumsum(axis=-1)
    first = elapsed[..., elapsed.shape[-1] // 2].mean()
    law, cut_law = rule.law(latencies), law_of(latencies)
    rows: list[dict[str, float | None]] = []
    for threshold in np.linspace(first, elapsed[..., -1].max(), _SWEPT).tolist():
        effect = rule.effect(latencies, threshold)
        cut = effect_of_threshold(*latencies, threshold, cut=True)
        rows.append(
            {
                "threshold": threshold,
                "speedup": effect.speedup,
                "drop_rate": effect.drop_rate,
                "cut_speedup": cut.speedup,
                "law": _speedup(law, threshold),
                "cut_law": _speedup(cut_law, threshold, cut=True),
            }
        )
    return rows


def step_seconds(
    latencies: Latencies, threshold: float, rule: Rule
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the times of all steps without a threshold, and with it: [steps] each."""
    effects = (
        [
            rule.effect(Latencies(*(array[step : step + 1] for array in latencies)), limit)
            for step in range(len(latencies.times))
        ]
        for limit in (math.inf, threshold)
    )
    before, after = (np.array([effect.step_seconds for effect in of]) for of in effects)
    return before, after
