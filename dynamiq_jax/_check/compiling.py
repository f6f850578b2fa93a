"""Calls between the compilation of a program and its first run, in the process that traced it."""

import functools
import threading
from collections.abc import Callable
from types import FrameType

import jax

from pallas_kernels._jax import compat

_COMPILED = "/jax/core/compile/backend_compile_duration"  # event of JAX, which comes before the run


class _Expected(threading.local):
    """Functions to call when this thread has compiled what it traced, with the calls that trace."""

    def __init__(self) -> None:
        self.functions: list[tuple[FrameType | None, Callable[[], None]]] = []


_expected = _Expected()


def after_compiling(function: Callable[[], None]) -> None:
    """Call a function when the program that is traced here has been compiled, before it runs.

    The program stays as it is, and its runs cost nothing. The function is forgotten if this thread
    compiles another program first: the trace has failed, or was made for a log alone.
    """
    _listen()
    _expected.functions.append((compat.running_call(), function))


@functools.cache  # once
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event != _COMPILED or compat.is_within_trace():
        return
    functions, _expected.functions = _expected.functions, []
    call = compat.running_call()
    for traced_by, function in functions:
        if traced_by is call:
            function()
