"""Backends with one fault, and a machine that takes one of them for its fastest kernels."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import first_use
from pallas_kernels._native.backend import Native
from pallas_kernels._xla import Xla
from pallas_kernels.backend import Backend
from pallas_kernels.registry import BACKENDS, BASE

NAME = "triton"  # in whose place they are


def backend(**faults) -> Backend:
    """Return kernels for this machine: the base with some operations replaced."""
    replaced = {name: staticmethod(function) for name, function in faults.items()}
    kind = {"name": NAME, "platform": "cuda", "needs_check": lambda self: True}
    return type("Faulty", (Xla,), kind | replaced)()


def _one_wrong_bit(*args, **kwargs):
    message = BASE.hop(*args, **kwargs)
    return message.at[32 * 14].set(message[32 * 14] ^ np.uint8(1))


def _one_wrong_value(*args, **kwargs):
    rows = BASE.decompress(*args, **kwargs)
    usual = jnp.argmax(jnp.where(jnp.abs(rows) < 1, jnp.abs(rows), 0))
    return rows.reshape(-1).at[usual].multiply(np.float32(1 + 2**-12)).reshape(rows.shape)


def _not_compiled(*args, **kwargs):
    raise NotImplementedError("no lowering for shuffles\non this chip")


def _never_compiled(*args, **kwargs):
    released.wait(60)
    raise NotImplementedError("the test is over")


released = threading.Event()  # of compilers that hang, once a test is over

# Fault: (backend, expected words about the check of its first use).
BROKEN = {
    "one wrong bit": (backend(hop=_one_wrong_bit), "compress: 1 of .* bytes differ"),
    "one wrong value": (backend(decompress=_one_wrong_value), "decompress: . of .* more than"),
    "an exception": (
        backend(statistics=_not_compiled),
        "NotImplementedError: no lowering for shuffles",
    ),
    "a time-out": (backend(hop=_never_compiled), "TimeoutError: no result after 0.5 s"),
}


def choose(monkeypatch: pytest.MonkeyPatch, chosen: Backend) -> None:
    """Take a backend for the kernels that are the fastest on this machine."""
    by_platform = lax.platform_dependent

    def platform_dependent(*args, default, **platforms):
        if "cuda" in platforms:
            return platforms["cuda"](*args)
        return by_platform(*args, default=default, **platforms)

    monkeypatch.setitem(BACKENDS, NAME, chosen)
    # Which has a check of its own, where programs are optimized.
    monkeypatch.setattr(Native, "why_not_here", lambda self: "left out")
    monkeypatch.setattr(lax, "platform_dependent", platform_dependent)
    monkeypatch.setattr(first_use, "_reasons", {})
