"""Wall times of calls: medians of repeated calls, and of calls in turns."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Name = TypeVar("Name")


def timed(
    call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> tuple[Any, float]:
    """Return the result of a call, once it is ready, and its seconds by a clock.

    `time.process_time` is a clock of all cores, for compilers.
    """
    start = clock()
    result = jax.block_until_ready(call())
    return result, clock() - start


def median_seconds(function: Callable[..., Any], *args: Any, repeats: int = 15) -> float:
    """Return the median wall time of a call, compiled and warm, until its result is ready."""
    seconds = in_turns({"": lambda: function(*args)}, repeats)
    return statistics.median(seconds[""])


def in_turns(
    calls: Mapping[Name, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """Return the times of several calls in turns, compiled and warm: wall times, or by a clock.

    Other work on the machine then slows all of them: see `median_ratio`.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(timed(call, clock)[1])
    return seconds


def median_ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of the times of two calls in the same turn."""
    return statistics.median(own / other for own, other in zip(seconds, others, strict=True))
