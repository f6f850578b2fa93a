"""Operations on sums in an order of their own, and on widths, made of the others of a backend.

Sections 1 and 7 of docs/wire_format.md. A backend may have faster ones.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.codec import Index, Layout, LocalRows, Places, scales


def operation(backend: Any, name: str) -> Callable[..., Any]:
    """Return an operation by the others of a backend, a module."""
    return functools.partial(_OPERATIONS[name], backend)


def solve(_: Any, energies: Array, *, layout: Layout) -> Array:
    """Solve for widths; see `pallas_kernels.operations.solve`."""
    return layout.solve(energies)


def energies(_: Any, payloads: Array, *, layout: Layout) -> Array:
    """Compute energies of rows; see `pallas_kernels.operations.energies`."""
    return scales.row_energies(*layout.scales(payloads)).astype(jnp.int32)


def scaled_sums(
    backend: Any, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> tuple[Array, Array]:
    """Sum rows, and compute scales; see `pallas_kernels.operations.scaled_sums`."""
    rows = backend.decompress_accumulate(payloads, local, chunk, layout=layout)
    of_rows = scales.quantize_scales(scales.group_maxima(rows, layout.group_size))
    return rows, layout.with_scales(jnp.zeros_like(payloads[0]), *of_rows)


def decompress_sums(
    backend: Any, payloads: Array, places: Places, table: Array, *, layout: Layout
) -> Array:
    """Decode sums; see `pallas_kernels.operations.decompress_sums`."""
    group_bytes, super_bits = layout.scales(payloads)
    ordered = (
        places,
        jnp.take_along_axis(group_bytes, table[..., None], axis=1),
        jnp.take_along_axis(super_bits, table, axis=1),
    )
    # Fused into the decoding of every block, the gathers take twice its time on XLA:CPU.
    places, *of_rows = lax.optimization_barrier(ordered)
    return backend.decompress(layout.with_scales(payloads, *of_rows), places, layout=layout)


_OPERATIONS = {
    function.__name__: function for function in (solve, energies, scaled_sums, decompress_sums)
}
