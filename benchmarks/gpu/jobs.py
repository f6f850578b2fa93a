"""The operations that are timed: kernels of every backend, and the same steps of plain codecs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from benchmarks.error.plain_codecs import PLAIN_CODECS, PlainCodec
from pallas_kernels import operations
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, Places, place_rows
from pallas_kernels.codec.scales import bfloat16_bits

KERNELS = ("statistics", "compress", "hop", "decompress")
IMPLEMENTATIONS = ("triton", "xla")

JobName = tuple[str, str]  # operation, implementation


class Job(NamedTuple):
    """An operation by some backend or plain codec."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]  # names of its arguments, see `cases`


def kernel_jobs(layout: Layout) -> dict[JobName, Job]:
    """Return the four kernels of every backend, and the places, which all take from XLA."""
    jobs = {("places", "xla"): Job(functools.partial(places_of, layout=layout), ("norms",))}
    for name in IMPLEMENTATIONS:
        chosen: dict[str, Any] = {"layout": layout, "implementation": name}
        jobs |= {
            ("statistics", name): Job(
                functools.partial(operations.statistics, implementation=name),
                ("rows",),
            ),
            ("compress", name): Job(
                functools.partial(operations.compress, **chosen),
                ("local", "chunk", "first turn"),
            ),
            ("hop", name): Job(
                functools.partial(operations.hop, **chosen),
                ("payload", "local", "chunk", "second turn"),
            ),
            ("decompress", name): Job(
                functools.partial(operations.decompress, **chosen),
                ("payload", "places"),
            ),
        }
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


def places_of(norms: Array, *, layout: Layout) -> Places:
    """Return the places of all rows, from their norms."""
    return place_rows(bfloat16_bits(norms), layout)


def program_key(
    operation: str, implementation: str, size: int, dtype: str, bits: float | None
) -> tuple:
    """Name an executable. Those that bits do not change share one among all bits."""
    fixed = operation == "statistics" or implementation in PLAIN_CODECS
    return operation, implementation, size, dtype, None if fixed else bits


def floor_bytes(operation: str, implementation: str, layout: Layout, dtype: str) -> float:
    """Return the bytes that a coordinate has to move at least: every input read and every output
    written once.
    """
    local = jnp.dtype(dtype).itemsize
    if implementation in PLAIN_CODECS:
        wire, order = PLAIN_CODECS[implementation].wire_bytes, 0.0
    else:
        wire = layout.payload_bytes / (layout.rows_per_chunk * SUPER_GROUP_SIZE)
        order = 4 / SUPER_GROUP_SIZE
    return {
        "statistics": local + 4 / SUPER_GROUP_SIZE,
        "places": 8 / SUPER_GROUP_SIZE,
        "compress": local + wire + order,
        "hop": local + 2 * wire + order,
        "decompress": wire + 4 + order,
    }[operation]


def _plain_compress(codec: PlainCodec, rows: Array) -> tuple[Array, Array]:
    return codec.encode(codec.blocks(rows))


def _plain_hop(codec: PlainCodec, codes: Array, scale: Array, rows: Array) -> tuple[Array, Array]:
    return codec.hop(codes, scale, codec.blocks(rows))
