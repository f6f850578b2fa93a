"""Memory of this machine."""

import os

import pytest


def needs_memory(gigabytes: float) -> None:
    """Skip a test on a machine that has less memory to give."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:g} GB of free memory, and {free:.1f} GB are free")
