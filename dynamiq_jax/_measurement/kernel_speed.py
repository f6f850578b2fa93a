"""Time of every operation of the codec on one device, beside a copy of memory."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import DynamiQ
from pallas_kernels import operations
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, LocalRows, place_rows
from pallas_kernels.codec.scales import bfloat16_bits

# Operations of a step of a ring, in the order in which a bucket meets them.
STEPS = ("statistics", "compress", "hop", "decompress")
_KEPT_BYTES = 24 * 2**30  # outputs and temporaries of calls that may be alive at once
_DRAWN = 2**20  # coordinates of a gradient that are drawn, and repeated up to its size


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


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time of one operation on a chunk."""

    backend: str
    operation: str
    size: int  # coordinates
    dtype: str
    bits: float
    seconds: float
    spread: float  # how far batches are apart, relative
    bytes_per_coordinate: float  # that have to be moved
    of_copy: float  # speed of moving these bytes over that of a copy


def copy_speed(num_bytes: int, batches: Batches) -> float:
    """Measure the speed of a copy in memory: bytes read and written in a second."""
    words = jnp.arange(num_bytes // 4, dtype=jnp.uint32)
    programs: tuple[Callable[[Any], Any], ...] = (jnp.copy, lambda x: x ^ np.uint32(1))
    times = [
        batches.time(jax.jit(program).lower(words).compile(), [[words]])["us"]
        for program in programs
    ]
    return 2 * words.nbytes / min(times) * 1e6


def measure_kernels(
    backend: str, size: int, *, dtype: str, bits: float, copy: float, batches: Batches
) -> list[Speed]:
    """Time the operations of a backend that can run here, beside a copy of speed `copy`."""
    layout = DynamiQ(bits=bits).layout(size, num_chunks=1)
    speeds = []
    for operation, arguments in _arguments(layout, dtype).items():
        compiled = jax.jit(operation_of(operation, backend, layout)).lower(*arguments).compile()
        timing = batches.time(compiled, [arguments])
        moved, seconds = least_bytes(operation, layout, dtype), timing["us"] / 1e6
        speeds.append(
            Speed(
                backend=backend,
                operation=operation,
                size=size,
                dtype=dtype,
                bits=bits,
                seconds=seconds,
                spread=timing["spread"],
                bytes_per_coordinate=moved,
                of_copy=moved * size / seconds / copy,
            )
        )
    return speeds


def operation_of(operation: str, backend: str, layout: Layout) -> Callable[..., Any]:
    """Return an operation by a named backend, of arrays alone."""
    chosen: dict[str, Any] = {} if operation == "statistics" else {"layout": layout}
    return functools.partial(getattr(operations, operation), implementation=backend, **chosen)


def least_bytes(operation: str, layout: Layout, dtype: str) -> float:
    """Return the bytes of a coordinate of every input, read once, and output, written once."""
    local = jnp.dtype(dtype).itemsize
    wire = layout.payload_bytes / (layout.rows_per_chunk * SUPER_GROUP_SIZE)
    order = 4 / SUPER_GROUP_SIZE
    return {
        "statistics": local + 4 / SUPER_GROUP_SIZE,
        "compress": local + wire + order,
        "hop": local + 2 * wire + order,
        "decompress": wire + 4 + order,
    }[operation]


def _arguments(layout: Layout, dtype: str) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of every operation, made by the base."""
    mine, other = (
        layout.as_rows(jnp.resize(jnp.asarray(drawn, dtype), (layout.size,)))
        for drawn in worker_gradients(2, min(layout.size, _DRAWN), seed=0)
    )
    norms = operation_of("statistics", "xla", layout)(mine)
    places = jax.jit(functools.partial(place_rows, layout=layout))(bfloat16_bits(norms))
    local = LocalRows(mine, places, jnp.array([1, 2], jnp.uint32))
    index, second = jnp.int32(0), jnp.int32(1)
    compress = operation_of("compress", "xla", layout)
    message = compress(local._replace(rows=other), index, index)[None]
    return {
        "statistics": (mine,),
        "compress": (local, index, index),
        "hop": (message, local, index, second),
        "decompress": (message, places),
    }


def _most_calls(executable: Callable[..., Any]) -> int:
    """Return how many results may be alive at once: the host runs ahead of the device."""
    try:
        analysis = executable.memory_analysis()  # type: ignore[attr-defined]
        alive = analysis.output_size_in_bytes + analysis.temp_size_in_bytes
    except Exception:  # not every backend has one
        return 16
    return max(2, min(4096, _KEPT_BYTES // max(alive, 1)))
