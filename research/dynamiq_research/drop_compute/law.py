"""Law of the effect of a compute threshold for normal latencies."""

import dataclasses
import math
from statistics import NormalDist

import jax
import numpy as np
from numpy.typing import NDArray

from dynamiq_jax.parts import check_integer, check_number

_EULER = 0.5772156649015329
_POINTS = 400  # of each integral; their error is below 1e-4 of the result
_REACH = 9.0  # deviations from the mean beyond which a normal variable has no weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class StragglerLaw:
    """Expected time and throughput of workers whose micro-batches take independent normal times.

    `cut=True` is the model of the paper (arXiv 2306.10598): a worker stops at the threshold, and
    the micro-batch that runs then is lost. `cut=False` is `DropCompute` with `in_flight=0`: a
    worker checks between micro-batches, and finishes the one that it has started. The last of
    many workers then ends later than the threshold by more than a mean micro-batch.

    The time without a threshold grows like the square root of the logarithm of `workers`.
    """

    mean: float  # seconds of a micro-batch
    deviation: float  # its standard deviation, seconds
    micro_batches: int  # of a worker and step
    workers: int
    rest: float  # seconds of a step after the accumulation

    def __post_init__(self):
        for name in ("mean", "deviation"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not possible. Give seconds above 0."
                )
        check_number("rest", self.rest, 0, float("inf"), "seconds of at least 0")
        check_integer("micro_batches", self.micro_batches, 1)
        check_integer("workers", self.workers, 2)

    @property
    def longest(self) -> float:
        """Approximate expected seconds of the last of all workers, without a threshold.

        The maximum of n normal variables has the mean (1 - g) q(1 - 1/n) + g q(1 - 1/(e n)) in
        deviations, with the Euler constant g and the normal quantile q.
        """
        quantile = NormalDist().inv_cdf
        beyond = (1 - _EULER) * quantile(1 - 1 / self.workers)
        beyond += _EULER * quantile(1 - 1 / (math.e * self.workers))
        count = self.micro_batches
        return self.mean * count + self.deviation * math.sqrt(count) * beyond

    def completed(self, threshold: float, *, cut: bool = False) -> float:
        """Compute the expected micro-batches that a worker does in a step."""
        before = [
            NormalDist(*self._after(count)).cdf(threshold)
            for count in range(1, self.micro_batches + 1)
        ]
        return sum(before) if cut else 1 + sum(before[:-1])

    def accumulation(self, threshold: float, *, cut: bool = False) -> float:
        """Compute the expected seconds until the last worker stops."""
        check_number("threshold", threshold, 0, math.inf, "seconds of at least 0, or inf")
        return min(threshold, self.longest) if cut else self._until_the_last(float(threshold))

    def speedup(self, threshold: float, *, cut: bool = False) -> float:
        """Compute the throughput in micro-batches a second, against no threshold."""
        kept = self.completed(threshold, cut=cut) / self.micro_batches
        before, after = (self.accumulation(limit, cut=cut) for limit in (math.inf, threshold))
        return kept * (before + self.rest) / (after + self.rest)

    def _until_the_last(self, threshold: float) -> float:
        """Integrate the probability that some worker accumulates longer than a time.

        A worker accumulates longer than t, beyond the threshold, if one of its micro-batches starts
        before the threshold and ends after t. These events exclude each other.
        """
        middle, width = self._after(self.micro_batches)
        early = np.linspace(0, min(threshold, middle + _REACH * width), _POINTS)
        longer = _normal_cdf((middle - early) / width)
        seconds = float(np.trapezoid(_of_any(longer, self.workers), early))
        if threshold > early[-1]:
            return seconds
        late = threshold + np.linspace(0, self.mean + _REACH * self.deviation, _POINTS)
        longer = _normal_cdf((self.mean - late) / self.deviation)  # the first starts at 0
        for count in range(1, self.micro_batches):
            middle, width = self._after(count)
            first, last = middle - _REACH * width, min(threshold, middle + _REACH * width)
            if first >= last:
                break
            starts = np.linspace(first, last, _POINTS)
            density = np.exp(-(((starts - middle) / width) ** 2) / 2)
            density /= width * math.sqrt(2 * math.pi)
            ends = _normal_cdf((starts + self.mean - late[:, None]) / self.deviation)
            longer += np.trapezoid(ends * density, starts, axis=1)
        return seconds + float(np.trapezoid(_of_any(longer, self.workers), late))

    def _after(self, count: int) -> tuple[float, float]:
        """Return mean and deviation of the time of some micro-batches."""
        return count * self.mean, math.sqrt(count) * self.deviation


def _normal_cdf(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(jax.scipy.special.ndtr(deviations.astype(np.float32)), np.float64)


def _of_any(probability: NDArray[np.float64], workers: int) -> NDArray[np.float64]:
    """Return the probability that at least one of independent workers has an event."""
    return 1 - (1 - np.clip(probability, 0, 1)) ** workers
