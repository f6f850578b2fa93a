"""Model and cores of this machine. Imports nothing that has to be installed."""

import os
import platform
from pathlib import Path


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_threads() -> int:
    """Return the number of threads that XLA has for programs on CPU devices."""
    # In the order in which XLA reads them.
    named = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC")
    return int(named) if named else num_cores()


def cpu_name() -> str:
    """Return the model of the CPU, as well as the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
