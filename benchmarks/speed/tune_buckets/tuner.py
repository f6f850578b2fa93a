"""Choice of a bucket size by measurement."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from dynamiq_jax.parts import check_integer

_GOLDEN = (3 - math.sqrt(5)) / 2  # shorter part of an interval by the golden section
_MIB = 2**20


class BucketTrial(NamedTuple):
    """One bucket size that was tried."""

    bucket_bytes: int
    seconds: float  # of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimer:
    """Time of a step: the median of some, after others that compile and warm up.

    With several processes it is the longest of their medians, the same in all. So all of them tune
    alike, as they have to: workers with other buckets would wait for each other.
    """

    warmup: int = 2  # steps that are not timed
    steps: int = 5  # steps that are
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self):
        check_integer("warmup", self.warmup, 0)
        check_integer("steps", self.steps, 1)

    def __call__(self, step: Callable[[], Any]) -> float:
        """Return the seconds of a step.

        Args:
          step: function that takes one step. Arrays that it returns are waited for.
        """
        for _ in range(self.warmup):
            jax.block_until_ready(step())
        seconds = []
        for _ in range(self.steps):
            start = self.clock()
            jax.block_until_ready(step())
            seconds.append(self.clock() - start)
        median = statistics.median(seconds)
        if jax.process_count() == 1:
            return median
        return float(np.max(multihost_utils.process_allgather(np.float32(median))))


def tune_bucket_bytes(
    seconds_of: Callable[[int], float],
    *,
    low: int = _MIB,
    high: int = 128 * _MIB,
    candidates: int = 8,
    rounds: int = 2,
) -> tuple[BucketTrial, ...]:
    """Search the bucket size with the shortest step.

        timer = StepTimer()
        trials = tune_bucket_bytes(lambda size: timer(make_step(size)))
        bucket_bytes = trials[0].bucket_bytes

    Sizes on a logarithmic grid are tried first. Rounds of a golden section follow, between the
    neighbors of the best one. This is in place of the Bayesian optimization of DeAR (arXiv
    2302.12445), which brings nothing for one number and ten trials.

    A size takes a compilation. It has to be tried where it will be used: the best one depends on
    the model, the workers and the link.

    Args:
      seconds_of: function of a bucket size in bytes to the seconds of a step.
      low: smallest size, bytes.
      high: largest size, bytes. Above the bytes of all gradients nothing changes.
      candidates: sizes on the grid, the smallest and the largest included.
      rounds: further sizes.

    Returns:
      All trials, the fastest first; of equally fast ones, the first that was tried.

    Raises:
      ValueError: limits or counts that are not possible, or a time that is no positive number.

    >>> trials = tune_bucket_bytes(lambda size: 1 + abs(size - 20e6) / 1e9)
    >>> len(trials), 16e6 < trials[0].bucket_bytes < 24e6
    (10, True)
    """
    check_integer("low", low, 1)
    check_integer("high", high, low + 1)
    check_integer("candidates", candidates, 2)
    check_integer("rounds", rounds, 0)
    tried: dict[int, float] = {}

    def attempt(place: float) -> None:
        size = min(max(round(2**place), low), high)
        if size in tried:
            return
        seconds = seconds_of(size)
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"seconds_of({size}) is {seconds!r}, which is no time. Return positive seconds."
            )
        tried[size] = seconds

    for place in np.linspace(math.log2(low), math.log2(high), candidates).tolist():
        attempt(place)
    for _ in range(rounds):
        attempt(_next_place(tried))
    trials = [BucketTrial(size, seconds) for size, seconds in tried.items()]
    return tuple(sorted(trials, key=lambda trial: trial.seconds))


def _next_place(tried: dict[int, float]) -> float:
    """Return the logarithm of a size in the wider of the intervals beside the best one.

    Of equally wide ones, that with the faster end.
    """
    sizes = sorted(tried)
    best = min(tried, key=lambda size: tried[size])
    number = sizes.index(best)

    def octaves(size: int) -> float:
        return round(math.log2(size / best), 6)  # so that widths of the grid are equal

    beside = [size for size in sizes[max(0, number - 1) : number + 2] if size != best]
    end = max(beside, key=lambda size: (abs(octaves(size)), -tried[size]))
    return math.log2(best) + _GOLDEN * octaves(end)
