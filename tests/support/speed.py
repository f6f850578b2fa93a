"""Everything that makes the tests faster than the programs of users, and what each part gains.

`plugin.py` applies it. Files that are marked as `optimized` compile as users do, and so does
every file with `--optimized`. `test_as_users_compile.py` is such a file: it has every method,
topology and collective. Files that are marked as `frames` read lines of Python in programs.

Without optimizations XLA fuses no products with sums. The base then has other bytes than the native
codec, which is not used there (`pallas_kernels._native.library`): these tests run the base.

Seconds of CPU for two test files with everything, and with one part left out. They are means of
two to four runs on two cores of a CPU, with JAX 0.10.2. Runs differ by up to 8%, and those without
`ONE_PART` by 16%.

| left out                         | test_topologies | a file of gradients |
| -------------------------------- | --------------- | ------------------- |
| nothing                          | 27.3            | 14.7                |
| `jax_disable_most_optimizations` | 37.7 (+38%)     | 21.1 (+44%)         |
| `EMITTERS`                       | 41.9 (+54%)     | 24.0 (+64%)         |
| `ONE_PART`                       | 30.7 (+12%)     | 16.5 (+12%)         |
| both, which are `QUICK`          | 42.3 (+55%)     | 24.9 (+70%)         |
| `collect_garbage_rarely`         | 28.8 (+5%)      | 15.3 (+5%)          |
| all but the line before          | 55.9 (+105%)    | 29.1 (+98%)         |

`reuse_contexts` was measured later, with fewer tests: 8.3 and 12.9 s with it, 8.8 and 14.0 s
without (+6% and +8%). The second file then takes 810 MB of memory instead of 400.

Programs without frames of Python were measured last: 16.8 s for both files, 17.6 s with frames
(+5%).

`compile_once` was measured in two folders, compress and methods: 163 s with it, 192 s without
(+17%). A second run finds all programs of the first.

`MAX_EXAMPLES` gains in files of many properties: test_scales takes 4.8 s with the 100 examples of
Hypothesis, and 3.4 s with these (+42%).
"""

import contextlib
import functools
import gc
import hashlib
import importlib
import itertools
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

# XLA reads its flags again for each program, so that a file can have flags of its own.
READ_AGAIN = "--xla_flags_reset=true"

# Other emitters of fused loops.
EMITTERS = "--xla_cpu_use_fusion_emitters=false"
# A program is compiled as one part.
ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
# Later versions of XLA have one kind of emitters only, and end the process at a flag that they do
# not have.
QUICK = (EMITTERS, ONE_PART) if jax.__version_info__ < (0, 11) else ()

# Programs of one context of MLIR, which keeps their types; the next ones have another.
PROGRAMS_OF_A_CONTEXT = 200

# Examples of a property; Hypothesis has 100.
MAX_EXAMPLES = 25


def read_flags_again() -> None:
    """Let `compiling` change the flags of XLA between programs."""
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), READ_AGAIN)))


@contextlib.contextmanager
def compiling(*, optimized: bool, frames: bool) -> Iterator[None]:
    """Compile as users do, or without most optimizations, here and in processes that start here.

    With neither, the operations of a program do not name the lines of Python they come from.
    """
    jax.config.update("jax_disable_most_optimizations", not optimized)
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", limit if optimized or frames else 0)
    with pytest.MonkeyPatch.context() as patch:  # for processes that tests start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not optimized)))
        if not optimized:
            patch.setenv("XLA_FLAGS", " ".join((os.environ["XLA_FLAGS"], *QUICK)))
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_traceback_in_locations_limit", limit)


def folder_of_programs() -> Path:
    """Return the folder of compiled programs of processors like this one, for all runs.

    It is `~/.cache/dynamiq-jax-tests`, or as `DYNAMIQ_JAX_TEST_CACHE` says. JAX's own key has the
    program, the flags and the version of the compiler, but no features of the processor.
    """
    default = Path.home() / ".cache/dynamiq-jax-tests"
    root = Path(os.environ.get("DYNAMIQ_JAX_TEST_CACHE", default))
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    processor = hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]
    return root / processor


def prune(folder: Path, *, days: float, most_bytes: int) -> None:
    """Delete programs that were compiled some days ago, and the oldest above a number of bytes."""
    found = []
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run deletes as well
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    kept, oldest = 0, time.time() - 86400 * days
    for written, size, path in sorted(found, reverse=True):
        kept += size
        if written < oldest or kept > most_bytes:
            path.unlink(missing_ok=True)


def compile_once(folder: Path) -> None:
    """Compile equal programs once, in whichever test, process and run.

    Args:
      folder: folder of the compiled programs, one for all processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prune(folder, days=14, most_bytes=3 * 2**30)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Programs whose operations have other names are others: tests read them.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    storage = importlib.import_module("jax._src.lru_cache")
    storage.LRUCache.put = _put_at_once


def _put_at_once(cache: Any, key: str, value: bytes) -> None:
    """Store a compiled program, which others see as a whole or not at all.

    Threads of a process, such as islands of a test, may compile the same program at once.
    """
    final = cache.path / f"{key}-cache"
    partial = cache.path / f"{key}-{os.getpid()}-{threading.get_ident()}"
    partial.write_bytes(value)
    partial.replace(final)


def memory() -> float:
    """Return the bytes of memory that this process uses; infinity where that is not known."""
    pages = Path("/proc/self/statm")
    return (
        os.sysconf("SC_PAGE_SIZE") * int(pages.read_text().split()[1]) if pages.exists() else np.inf
    )


def collect_garbage_rarely() -> None:
    """Keep objects of traced programs, which stay for long, from being looked through again and
    again.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def reuse_contexts() -> None:
    """Lower many programs in one context of MLIR, since JAX takes 10 ms to make one for each."""
    lowering = importlib.import_module("jax._src.interpreters.mlir")
    if not hasattr(lowering, "make_ir_context"):
        return  # a later version of JAX, where tests take longer
    make, count = lowering.make_ir_context, itertools.count()
    context = functools.lru_cache(maxsize=1)(lambda number: make())
    lowering.make_ir_context = lambda: context(next(count) // PROGRAMS_OF_A_CONTEXT)
