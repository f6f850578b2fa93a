"""Programs of the benchmark, compiled and timed, and what has been measured so far."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.gpu.options import GpuOptions
from benchmarks.gpu.record import Record
from benchmarks.harness.batches import Batches

Program = tuple[Callable[..., Any], Sequence[Any]]  # a function, and arguments or their shapes


class GpuBench:
    """Programs by their keys, and results that sections hand on to later ones."""

    def __init__(self, options: GpuOptions, record: Record):
        self.options = options
        self.record = record
        self.batches = Batches(options.batches, options.batch_seconds, options.warm_seconds)
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
        """Time a compiled program on sets of arguments, see `Batches.time`.

        Returns:
          Its timing; None, with an error on record, if there is no program.
        """
        if key not in self.executables:
            return None
        with self.record.guard(f"run {key}"):
            return self.batches.time(self.executables[key], arg_sets)
        return None
