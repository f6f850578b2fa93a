"""Times of compiled programs in batches of calls, and of a copy of memory beside them."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEPT_BYTES = 24 * 2**30  # outputs and temporaries of calls that may be alive at once


@dataclasses.dataclass(frozen=True)
class Batches:
    """Number and length of the batches in which a program is timed."""

    count: int = 7  # the median batch counts
    seconds: float = 0.02  # least duration of a batch
    warm_seconds: float = 0.1  # of calls before, until clocks have risen

    def time(
        self, executable: Callable[..., Any], arg_sets: Sequence[Sequence[Any]]
    ) -> dict[str, Any]:
        """Time a compiled program on sets of arguments, one after the other.

        Returns:
          Median over batches, in microseconds of a call; how far they are apart; calls in a batch.
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
        while seconds < self.seconds and calls < limit:
            wanted = 1.3 * calls * self.seconds / max(seconds, 1e-9)
            calls = min(limit, 64 * calls, max(2 * calls, math.ceil(wanted)))
            seconds = batch(calls)
        while time.perf_counter() - started < self.warm_seconds:
            batch(calls)
        times = [batch(calls) / calls * 1e6 for _ in range(self.count)]
        median = statistics.median(times)
        return {"us": median, "spread": (max(times) - min(times)) / median, "calls": calls}


def copy_speed(num_bytes: int, batches: Batches) -> float:
    """Measure the speed of a copy in memory: bytes read and written in a second."""
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    programs: tuple[Callable[[Any], Any], ...] = (jnp.copy, lambda x: x ^ np.uint32(1))
    times = [
        batches.time(jax.jit(program).lower(words).compile(), [[words]])["us"]
        for program in programs
    ]
    return 2 * words.nbytes / min(times) * 1e6


def _most_calls(executable: Callable[..., Any]) -> int:
    """Return how many results may be alive at once: the host runs ahead of the device."""
    try:
        analysis = executable.memory_analysis()  # type: ignore[attr-defined]
        alive = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    except Exception:  # not every backend has one
        return 16
    return max(2, min(4096, _KEPT_BYTES // max(alive, 1)))
