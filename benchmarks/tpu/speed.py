"""Time of every operation of the codec on one device, beside a copy of memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.batches import Batches
from benchmarks.harness.device_gradients import device_gradient
from benchmarks.harness.operations import least_bytes, operation_of
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.codec import Layout, LocalRows, place_rows
from pallas_kernels.codec.scales import bfloat16_bits


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time of one operation on a chunk."""

    backend: str
    operation: str
    size: int  # coordinates
    dtype: str
    bits: float
    seconds: float
    spread: float  # how far batches are apart, relative
    bytes_per_coordinate: float  # that have to be moved
    of_copy: float  # speed of moving these bytes over that of a copy


def measure_kernels(
    backend: str, size: int, *, dtype: str, bits: float, copy: float, batches: Batches
) -> list[Speed]:
    """Time the operations of a backend that can run here, beside a copy of speed `copy`."""
    layout = DynamiQ(bits=bits).layout(size, num_chunks=1)
    speeds = []
    for operation, arguments in _arguments(layout, dtype).items():
        compiled = jax.jit(operation_of(operation, backend, layout)).lower(*arguments).compile()
        timing = batches.time(compiled, [arguments])
        moved, seconds = least_bytes(operation, layout, dtype), timing["us"] / 1e6
        speeds.append(
            Speed(
                backend=backend,
                operation=operation,
                size=size,
                dtype=dtype,
                bits=bits,
                seconds=seconds,
                spread=timing["spread"],
                bytes_per_coordinate=moved,
                of_copy=moved * size / seconds / copy,
            )
        )
    return speeds


def _arguments(layout: Layout, dtype: str) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of every operation, made by the base."""
    mine, other = (
        layout.as_rows(device_gradient(worker, layout.size, 0, dtype)) for worker in range(2)
    )
    norms = operation_of("statistics", "xla", layout)(mine)
    places = jax.jit(functools.partial(place_rows, layout=layout))(bfloat16_bits(norms))
    local = LocalRows(mine, places, jnp.array([1, 2], jnp.uint32))
    index, second = jnp.int32(0), jnp.int32(1)
    compress = operation_of("compress", "xla", layout)
    message = compress(local._replace(rows=other), index, index)[None]
    return {
        "statistics": (mine,),
        "compress": (local, index, index),
        "hop": (message, local, index, second),
        "decompress": (message, places),
    }
