"""The operations of the codec on whole messages, each run by one of several backends.

    operations.by("triton").hop(payloads, local, chunk, turn, layout=layout)
    operations.by().hop(payloads, local, chunk, turn, layout=layout)  # the fastest one

They are those of `pallas_kernels.backend.Backend`, which describes them.
"""

import dataclasses
import functools
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from pallas_kernels import choice, first_use
from pallas_kernels.backend import Backend
from pallas_kernels.codec import Index, Layout, LocalRows


def by(implementation: str | None = None) -> Backend:
    """Return the operations of a backend, by its name, or those of the fastest one for each.

    A name that is not possible is an error of the operation; see `pallas_kernels.choice.run`.
    """
    return cast(Backend, _Chosen(implementation))


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Operations of `Backend` that choose the backend when they are called."""

    implementation: str | None

    def __getattr__(self, name: str) -> Any:
        return functools.partial(choice.run, self.implementation, getattr(Backend, name))


def compress(
    local: LocalRows,
    chunk: Index,
    turn: Index,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Encode one chunk of the local rows: the first message on its path.

    It is a `hop` without a received message, of the type of messages that suits the backend.
    """
    dtype = choice.message_dtype(implementation)
    nothing = jnp.zeros((0, layout.payload_bytes // jnp.dtype(dtype).itemsize), dtype)
    return by(implementation).hop(nothing, local, chunk, turn, layout=layout)


def refused_backends() -> tuple[str, ...]:
    """Return the backends that this process refuses, after the check of the default one."""
    choice.default()  # any choice of it checks it
    return first_use.refused()


def default_backend() -> str:
    """Describe the backend that runs programs here, in one line; see `choice.default`."""
    return choice.default()
