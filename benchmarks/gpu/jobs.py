"""The operations that are timed: kernels of every backend, and the same steps of plain codecs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from benchmarks.error.plain_codecs import PLAIN_CODECS, PlainCodec
from benchmarks.harness.operations import STEPS, least_bytes, operation_of
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, Places, place_rows
from pallas_kernels.codec.scales import bfloat16_bits
from pallas_kernels.registry import BACKENDS, BASE

# The default one first.
_KERNELS_OF_GPUS = [backend for backend in BACKENDS.values() if backend.platform == "cuda"]
_INPUTS = {
    "statistics": ("rows",),
    "compress": ("local", "chunk", "first turn"),
    "hop": ("payload", "local", "chunk", "second turn"),
    "decompress": ("payload", "places"),
}

JobName = tuple[str, str]  # operation, implementation


def implementations() -> tuple[str, ...]:
    """Return the backends that run on this machine: kernels, the default ones first, and XLA."""
    names = [backend.name for backend in _KERNELS_OF_GPUS]
    return (*(name for name in names if name not in left_out()), BASE.name)


def left_out() -> dict[str, str]:
    """Return why kernels do not run on this machine, by the name of the backend."""
    return {b.name: reason for b in _KERNELS_OF_GPUS if (reason := b.why_not_here())}


class Job(NamedTuple):
    """An operation by some backend or plain codec."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]  # names of its arguments, see `cases`


def places_of(norms: Array, *, layout: Layout) -> Places:
    """Return the places of all rows, from their norms."""
    return place_rows(bfloat16_bits(norms), layout)


def kernel_jobs(layout: Layout) -> dict[JobName, Job]:
    """Return the four kernels of every backend, and the places, which all take from XLA."""
    jobs = {("places", "xla"): Job(functools.partial(places_of, layout=layout), ("norms",))}
    for name in implementations():
        for operation in STEPS:
            function = operation_of(operation, name, layout)
            jobs[operation, name] = Job(function, _INPUTS[operation])
    return jobs


def plain_jobs() -> dict[JobName, Job]:
    """Return compress, hop and decompress of the plain codecs."""
    jobs: dict[JobName, Job] = {}
    for name, codec in PLAIN_CODECS.items():
        message = (f"{name} codes", f"{name} scale")
        jobs |= {
            ("compress", name): Job(functools.partial(_plain_compress, codec), ("rows",)),
            ("hop", name): Job(functools.partial(_plain_hop, codec), (*message, "rows")),
            ("decompress", name): Job(codec.decode, message),
        }
    return jobs


def program_key(
    operation: str, implementation: str, size: int, dtype: str, bits: float | None
) -> tuple:
    """Name an executable. Those that bits do not change share one among all bits."""
    fixed = operation == "statistics" or implementation in PLAIN_CODECS
    return operation, implementation, size, dtype, None if fixed else bits


def floor_bytes(operation: str, implementation: str, layout: Layout, dtype: str) -> float:
    """Return the bytes that a coordinate has to move at least, see `least_bytes`."""
    if operation == "places":
        return 8 / SUPER_GROUP_SIZE
    if implementation not in PLAIN_CODECS:
        return least_bytes(operation, layout, dtype)
    local, wire = jnp.dtype(dtype).itemsize, PLAIN_CODECS[implementation].wire_bytes
    return {"compress": local + wire, "hop": local + 2 * wire, "decompress": wire + 4}[operation]


def _plain_compress(codec: PlainCodec, rows: Array) -> tuple[Array, Array]:
    return codec.encode(codec.blocks(rows))


def _plain_hop(codec: PlainCodec, codes: Array, scale: Array, rows: Array) -> tuple[Array, Array]:
    return codec.hop(codes, scale, codec.blocks(rows))
