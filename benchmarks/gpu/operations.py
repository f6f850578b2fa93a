"""What is timed: the kernels of every backend, and the same steps of the plain codecs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from benchmarks.gpu.baselines import PLAIN_CODECS, PlainCodec
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.ordering import order_rows
from pallas_kernels.codec.scales import bfloat16_bits
from pallas_kernels.operations import compress, decompress, hop, statistics

KERNELS = ("statistics", "compress", "hop", "decompress")
IMPLEMENTATIONS = ("triton", "xla")

JobName = tuple[str, str]  # operation, implementation


class Job(NamedTuple):
    """An operation by some backend or plain codec."""

    function: Callable[..., Any]
    inputs: tuple[str, ...]  # names of its arguments, see `gpu.cases`


def kernel_jobs(layout: Layout) -> dict[JobName, Job]:
    """The four kernels of every backend, and the sort that no backend has of its own."""
    jobs = {("order", "xla"): Job(functools.partial(order_of, layout=layout), ("norms",))}
    for name in IMPLEMENTATIONS:
        chosen: dict[str, Any] = {"layout": layout, "implementation": name}
        jobs |= {
            ("statistics", name): Job(
                functools.partial(statistics, implementation=name),
                ("rows",),
            ),
            ("compress", name): Job(
                functools.partial(compress, **chosen),
                ("rows", "order", "chunk", "zero", "seed"),
            ),
            ("hop", name): Job(
                functools.partial(hop, **chosen),
                ("payload", "rows", "order", "chunk", "hop", "seed"),
            ),
            ("decompress", name): Job(
                functools.partial(decompress, **chosen),
                ("payload", "order"),
            ),
        }
    return jobs


def plain_jobs() -> dict[JobName, Job]:
    """Compress, hop and decompress of the plain codecs."""
    jobs: dict[JobName, Job] = {}
    for name, codec in PLAIN_CODECS.items():
        message = (f"{name} codes", f"{name} scale")
        jobs |= {
            ("compress", name): Job(functools.partial(_plain_compress, codec), ("rows",)),
            ("hop", name): Job(functools.partial(_plain_hop, codec), (*message, "rows")),
            ("decompress", name): Job(codec.decode, message),
        }
    return jobs


def order_of(norms: Array, *, layout: Layout) -> Array:
    """Original row of every place."""
    return order_rows(bfloat16_bits(norms), layout)


def program_key(
    operation: str, implementation: str, size: int, dtype: str, bits: float | None
) -> tuple:
    """Name of an executable; those that bits do not change share one among all bits."""
    fixed = operation == "statistics" or implementation in PLAIN_CODECS
    return operation, implementation, size, dtype, None if fixed else bits


def _plain_compress(codec: PlainCodec, rows: Array) -> tuple[Array, Array]:
    return codec.encode(_blocks(codec, rows))


def _plain_hop(codec: PlainCodec, codes: Array, scale: Array, rows: Array) -> tuple[Array, Array]:
    return codec.encode(codec.decode(codes, scale) + _blocks(codec, rows))


def _blocks(codec: PlainCodec, rows: Array) -> Array:
    return rows.reshape(-1, codec.block).astype(jnp.float32)
