"""Order of collectives: each collective of a trace begins after the last one has arrived.

Independent collectives of one program are a danger where one of them is a loop. XLA:CPU starts the
loop, and starts the other collective before the loop has ended. The order of their messages then
differs between processes. These hang, or confuse the messages of the two collectives.

A function that JAX traces apart is a trace of its own: in `jit`, `scan` or `cond`, or one that is
differentiated. Its collectives are not ordered with those of its caller, unless it takes the token
and returns the next one. Those of a `vmap` are, with all that come behind them.
"""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import get_opaque_trace_state

from pallas_kernels._jax import compat
from pallas_kernels._jax.dependencies import never


class _Tokens(threading.local):
    """Tokens of the last collectives of the traces that a thread is in."""

    def __init__(self) -> None:
        self.of_traces: list[tuple[Any, weakref.ref[Array]]] = []


_tokens = _Tokens()


def last_token() -> Array | None:
    """Return a token of the last collective of this trace, float32 scalar; None if it is the first.

    A token of another trace is not available here: a function that `jax.jit` traces once has many
    callers.
    """
    here = get_opaque_trace_state()
    return next((token() for trace, token in _tokens.of_traces if trace == here), None)


def remember(token: Array | None) -> None:
    """Store the token of the last collective of this trace; None keeps the one before."""
    if not isinstance(token, jax.core.Tracer):  # without a trace, each call is a program of its own
        return
    if jax.sharding.get_abstract_mesh().manual_axes:  # a vmap alone sends no messages
        token = _of_all_rows(lax.stop_gradient(token))
    _store(token)


@jax.custom_batching.custom_vmap
def _of_all_rows(token: Array) -> Array:
    """Return a token that is available once all rows of each `jax.vmap` around it have theirs."""
    return token


@_of_all_rows.def_vmap
def _of_rows(size: int, are_rows: list[bool], token: Array) -> tuple[Array, bool]:
    """Store the token of all rows in the trace around the `jax.vmap`, which keeps it alive."""
    del size, are_rows
    whole = _of_all_rows(jnp.max(token))
    _store(whole)
    return whole, False


def _store(token: Array) -> None:
    # The trace holds the arguments of its equations, and so the token, until the trace ends. Any
    # other reference to the token would keep the memory of the trace after its end.
    never(token)
    here = get_opaque_trace_state()
    others = [
        (trace, each) for trace, each in _tokens.of_traces if each() is not None and trace != here
    ]
    _tokens.of_traces = [*others, (here, weakref.ref(token))]


def after(token: Array | None, value: Array) -> Array:
    """Delay a value until a token is available; None delays nothing.

    So buckets are sent one after the other. Otherwise XLA joins the transfers of several buckets,
    or delays all transfers until one bucket is ready, and no transfer runs under the backward pass.
    """
    if token is None or not compat.varying_axes(token) <= compat.varying_axes(value):
        return value
    if not _has_numbers(value):
        return value
    return jnp.where(never(token), jnp.zeros_like(value), value)


def token_of(values: Sequence[Array | None]) -> Array | None:
    """Return a token, float32 scalar, that is available when all values are, or else None."""
    flags = [never(value) for value in values if value is not None and _has_numbers(value)]
    # XLA computes a reduction once. A chain of `or` it would copy into all that wait for the token.
    return jnp.max(jnp.stack(flags).astype(jnp.float32)) if flags else None


def _has_numbers(value: Array) -> bool:
    return bool(value.size) and not jnp.issubdtype(value.dtype, jax.dtypes.extended)
