"""Programs of the benchmark, compiled and timed, and what has been measured so far."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.gpu.options import Options
from benchmarks.gpu.record import Record

Program = tuple[Callable[..., Any], Sequence[Any]]  # a function, and arguments or their shapes

_KEPT_BYTES = 24 * 2**30  # outputs and temporaries of calls that may be alive at once


class Bench:
    """Programs by their keys, and results that sections hand on to later ones."""

    def __init__(self, options: Options, record: Record):
        self.options = options
        self.record = record
        self.executables: dict[Any, Callable[..., Any]] = {}
        self.rows: list[dict[str, Any]] = []  # every timed operation, see `report`
        self.copy_bytes_per_second = math.nan  # until the section `device` has measured it

    def compile_all(self, programs: Mapping[Any, Program]) -> None:
        """Compile new programs on all cores. An error is recorded, and the key stays absent."""
        lowered = {}
        for key, (function, args) in programs.items():
            if key not in self.executables:
                # Traced here: the mode of the kernels is a context variable of this thread.
                with self.record.guard(f"trace {key}"):
                    lowered[key] = jax.jit(function).lower(*args)
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            futures = {key: pool.submit(value.compile) for key, value in lowered.items()}
        for key, future in futures.items():
            with self.record.guard(f"compile {key}"):
                self.executables[key] = future.result()

    def measure(self, key: Any, arg_sets: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
        """Time a compiled program on sets of arguments, one after the other.

        Returns:
          Median over batches of calls that follow each other, in microseconds; how far batches are
          apart; and calls in a batch. None, with an error on record, if there is no program.
        """
        if key not in self.executables:
            return None
        with self.record.guard(f"run {key}"):
            return _time(self.executables[key], arg_sets, self.options)
        return None


def _time(
    executable: Callable[..., Any], arg_sets: Sequence[Sequence[Any]], options: Options
) -> dict[str, Any]:
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
    """Return how many results may be alive at once: the host runs ahead of the device."""
    try:
        analysis = executable.memory_analysis()  # type: ignore[attr-defined]
        alive = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    except Exception:  # not every backend has one
        return 16
    return max(2, min(4096, _KEPT_BYTES // max(alive, 1)))
