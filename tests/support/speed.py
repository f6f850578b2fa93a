"""Everything that makes the tests faster than the programs of users are compiled and run.

`conftest.py` applies it. Files that are marked as `optimized` compile as users do, and so do all
with `--optimized`: each of these gains is then lost, except the last two.
"""

import contextlib
import gc
import os
from collections.abc import Iterator

import jax
import pytest

# XLA reads its flags again for each program, so that a file can have flags of its own.
READ_AGAIN = "--xla_flags_reset=true"

EMITTERS = "--xla_cpu_use_fusion_emitters=false"
ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
# Later versions of XLA have one kind of emitters only, and end the process at a flag that they do
# not have.
QUICK = (EMITTERS, ONE_PART) if jax.__version_info__ < (0, 11) else ()

# Examples of a property; Hypothesis has 100.
MAX_EXAMPLES = 25


def read_flags_again() -> None:
    """Let `compiling` change the flags of XLA between programs."""
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), READ_AGAIN)))


@contextlib.contextmanager
def compiling(*, optimized: bool) -> Iterator[None]:
    """Compile as users do, or without most optimizations, here and in processes that start here."""
    jax.config.update("jax_disable_most_optimizations", not optimized)
    with pytest.MonkeyPatch.context() as patch:  # for processes that tests start
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(not optimized)))
        if not optimized:
            patch.setenv("XLA_FLAGS", " ".join((os.environ["XLA_FLAGS"], *QUICK)))
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def collect_garbage_rarely() -> None:
    """Keep objects of traced programs, which stay for long, from being looked through again and
    again.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
