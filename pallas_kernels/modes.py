"""Modes in which kernels are traced: for this machine, interpreted, or for another machine."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

_without_gpu: contextvars.ContextVar[str | None] = contextvars.ContextVar("mode", default=None)


@contextlib.contextmanager
def without_gpu(mode: Literal["interpret", "compile"]) -> Iterator[None]:
    """Trace kernels on a machine that cannot run them, to interpret them or for another one."""
    token = _without_gpu.set(mode)
    try:
        yield
    finally:
        _without_gpu.reset(token)


def interpreting() -> bool:
    """Return whether kernels are interpreted."""
    return _without_gpu.get() == "interpret"


def is_for_this_machine() -> bool:
    """Return whether kernels are compiled for this machine: neither interpreted nor for another."""
    return _without_gpu.get() is None
