"""What sections share: options, record, compiled programs, and what has been measured."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.gpu import timing
from benchmarks.gpu.options import Options
from benchmarks.gpu.record import Record

Program = tuple[Callable[..., Any], Sequence[Any]]  # a function, and arguments or their shapes


class Bench:
    """Compiles and times programs, and remembers them by their keys."""

    def __init__(self, options: Options, record: Record):
        self.options = options
        self.record = record
        self.executables: dict[Any, Callable[..., Any]] = {}
        self.rows: list[dict[str, Any]] = []  # every timed operation, see `gpu.rows`
        self.copy_bytes_per_second = math.nan  # until the section `device` has measured it

    def compile_all(self, programs: Mapping[Any, Program]) -> None:
        """Compiles what is not yet, on all cores; errors are recorded, and the key stays absent."""
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
        """Time of a compiled program; None, with an error on record, if there is none."""
        if key not in self.executables:
            return None
        with self.record.guard(f"run {key}"):
            return timing.measure(self.executables[key], arg_sets, self.options)
        return None
