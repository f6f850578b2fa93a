"""The time of one of many calls that follow each other on the device."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.gpu.options import Options

_KEPT_BYTES = 24 * 2**30  # outputs and temporaries of calls that may be alive at once


def measure(
    executable: Callable[..., Any], arg_sets: Sequence[Sequence[Any]], options: Options
) -> dict[str, Any]:
    """Median over batches of calls that take one set of arguments after the other, in microseconds;
    how far batches are apart; and calls in a batch.
    """

    def batch(calls: int) -> float:
        result = None
        start = time.perf_counter()
        for call in range(calls):
            result = executable(*arg_sets[call % len(arg_sets)])
        # The device does calls in order: when the last is done, all are.
        jax.block_until_ready(result)
        return time.perf_counter() - start

    limit, calls = _most_calls(executable), 1
    started = time.perf_counter()
    seconds = batch(calls)
    # Until a batch is long enough, and clocks that fell during compilation have risen.
    while seconds < options.batch_seconds and calls < limit:
        wanted = 1.3 * calls * options.batch_seconds / max(seconds, 1e-9)
        calls = min(limit, 64 * calls, max(2 * calls, math.ceil(wanted)))
        seconds = batch(calls)
    while time.perf_counter() - started < options.warm_seconds:
        batch(calls)
    times = [batch(calls) / calls * 1e6 for _ in range(options.batches)]
    median = statistics.median(times)
    return {"us": median, "spread": (max(times) - min(times)) / median, "calls": calls}


def _most_calls(executable: Callable[..., Any]) -> int:
    """Calls whose results may be alive at once: the host runs ahead of the device."""
    try:
        analysis = executable.memory_analysis()  # type: ignore[attr-defined]
        alive = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    except Exception:  # not every backend has one
        return 16
    return max(2, min(4096, _KEPT_BYTES // max(alive, 1)))
