"""Command line and environment of processes that run this package on CPU devices."""

import os
import sys
from pathlib import Path

from dynamiq_jax._console.environment import num_cores

# XLA:CPU uses half of AVX-512's width unless told; the codec gains a third. Elsewhere it changes
# nothing. The same flag in the user's XLA_FLAGS takes precedence.
VECTOR_WIDTH = "--xla_cpu_prefer_vector_width=512"


def threads_of_each(num_processes: int) -> int:
    """Return the threads of XLA in each of several processes that share this machine.

    They divide its cores, as more threads than cores would wait for one another.
    """
    return max(1, num_cores() // num_processes)


def python_environment(num_processes: int) -> dict[str, str]:
    """Return the environment of each of several processes that share this machine.

    Each has `threads_of_each`.
    """
    root = str(Path(__file__).parents[2])
    # A proxy is out of reach from an emulated host, and JAX would try it.
    kept = {name: value for name, value in os.environ.items() if "_proxy" not in name.lower()}
    path = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    flags = " ".join(filter(None, (VECTOR_WIDTH, kept.get("XLA_FLAGS"))))
    always = {"XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return {"NPROC": str(threads_of_each(num_processes))} | kept | always


def python_command(module: str, *arguments: str) -> list[str]:
    """Return a command line that runs a module with this Python."""
    return [sys.executable, "-m", module, *arguments]
