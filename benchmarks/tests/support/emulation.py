"""Marks tests that emulate hosts on this machine."""

import pytest

from benchmarks.emulation import namespaces
from dynamiq_jax._console.errors import CommandError


def cannot_emulate() -> str:
    """Why hosts cannot be emulated here; empty if they can."""
    try:
        namespaces.check_possible()
        with namespaces.emulated(1) as network:
            network.set_rate(1e9)
    except CommandError as error:
        return str(error)
    return ""


REASON = cannot_emulate()
emulates = pytest.mark.skipif(bool(REASON), reason=f"hosts cannot be emulated: {REASON}")
