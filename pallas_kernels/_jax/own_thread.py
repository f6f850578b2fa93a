"""Calls in a thread of their own: outside of a trace, and for a limited time."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import jax
from jax.extend.core import get_opaque_trace_state

Result = TypeVar("Result")


def in_own_thread(function: Callable[[], Result], seconds: float) -> Result:
    """Call a function in a new thread and return its result.

    Traces, meshes and most contexts of JAX belong to a thread. So arrays of the function are not
    part of a program that the calling thread traces, in whichever transformation. Switches that
    would make every program fail or slow are set to their defaults.

    Raises:
      TimeoutError: the function did not end in time. Nothing can end a compiler: its thread goes
        on, and ends with the process.
      Exception: what the function raised.
    """
    future: Future[Result] = Future()

    def call() -> None:
        try:
            with (
                jax.debug_nans(False),
                jax.debug_infs(False),
                jax.disable_jit(False),
                jax.transfer_guard("allow"),
            ):
                future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    # Not one of a pool, which a process waits for when it ends.
    threading.Thread(target=call, name="dynamiq-jax", daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no result after {seconds:g} s")
    return future.result()


def first_line(error: Exception) -> str:
    """Return the kind and the first line of an error, such as that of a compiler."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text:.300}"


def is_traced() -> bool:
    """Return whether JAX traces something in this thread, or maps it without a trace."""
    return get_opaque_trace_state() != _outside_of_traces()


@functools.cache
def _outside_of_traces() -> Any:
    """Return the state of JAX in which nothing is traced, as in every new thread."""
    return in_own_thread(get_opaque_trace_state, seconds=60)
