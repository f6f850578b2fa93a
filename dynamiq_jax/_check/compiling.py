"""Calls between the compilation of a program and its first run, in the process that traced it."""

import functools
import threading
from collections.abc import Callable
from types import FrameType

import jax

from pallas_kernels._jax import compat

_COMPILED = "/jax/core/compile/backend_compile_duration"  # event of JAX, which comes before the run


class _OfCalls(threading.local):
    """Functions to call when a call that traces has compiled, with the call."""

    def __init__(self) -> None:
        self.functions: list[tuple[FrameType, Callable[[bool], None]]] = []


_of_calls = _OfCalls()
_ahead: list[Callable[[bool], None]] = []  # of what was traced without a run
_lock = threading.Lock()


def after_compiling(function: Callable[[bool], None]) -> None:
    """Call a function when the program that is traced here has been compiled.

    The program stays as it is, and its runs cost nothing. The function is called with True if the
    call that traces the program is about to run it. A program that is only traced, as by
    `jit(f).lower`, may be compiled anywhere: the function is then called with False, when this
    process has next compiled some program.
    """
    _listen()
    call = compat.running_call()
    if call is None:
        with _lock:
            _ahead.append(function)
    else:
        _of_calls.functions.append((call, function))


@functools.cache  # once
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event != _COMPILED or compat.is_within_trace():
        return
    with _lock:
        ahead, _ahead[:] = [*_ahead], []
    for function in ahead:
        function(False)
    # Those of other calls are of traces that failed.
    functions, _of_calls.functions = _of_calls.functions, []
    call = compat.running_call()
    for traced_by, function in functions:
        if traced_by is call:
            function(True)
