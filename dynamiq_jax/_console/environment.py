"""Hardware, versions and date, which are kept with every result.

This module imports only what the library needs, as benchmarks run on machines without more.
"""

import datetime
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import dynamiq_jax
from dynamiq_jax._api.keep_memory import memory_is_kept
from pallas_kernels import operations


def environment(device: str) -> dict[str, Any]:
    """Describe this machine, its software, and the kind of the devices that were measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dynamiq_jax": dynamiq_jax.__version__,
        "device": device,
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }


def of_cpu_programs() -> dict[str, Any]:
    """Describe what the speed of programs on CPU devices of this process depends on.

    Returns:
      Threads of XLA, whether memory is kept between calls, and the line that names the codec. The
      first call may check the codec, which takes a second.
    """
    # In the order in which XLA reads them.
    threads = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return {
        "threads": int(threads) if threads else num_cores(),
        "memory_kept": memory_is_kept(),
        "codec": operations.default_backend(),
    }


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """Return the model of the CPU, as well as the system knows it."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
