"""Memory of this machine."""

from pathlib import Path

import pytest

_MEMINFO = Path("/proc/meminfo")


def needs_memory(gigabytes: float) -> None:
    """Skip a test on a machine that has less memory available, or does not say how much."""
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    if kib is None or int(kib) * 1024 < gigabytes * 1e9:
        available = "unknown" if kib is None else f"{int(kib) * 1024 / 1e9:.1f} GB"
        pytest.skip(f"needs {gigabytes:g} GB of memory; available: {available}")
