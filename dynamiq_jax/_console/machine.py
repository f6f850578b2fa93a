"""Model, cores and malloc of this machine. Imports nothing that has to be installed."""

import os
import platform
from pathlib import Path

# XLA allocates the buffers of every call anew. glibc would take those of 32 MiB and more from the
# kernel and give them back, and page faults would be a third of an all-reduce. Keep them, in huge
# pages.
MALLOC = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (
        ("hugetlb", 1),
        ("mmap_threshold", 4 * 2**30),
        ("trim_threshold", 8 * 2**30),
    )
)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the model of the CPU, as well as the system knows it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
