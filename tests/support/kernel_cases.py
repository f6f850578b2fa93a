"""Small layouts, rows and messages, for kernels that are slow to interpret."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import choice, modes, operations
from pallas_kernels.codec import Allocation, Layout, LocalRows, Quantizer, make_places

SEED = np.array([123456789, 987654321], np.uint32)
QUANTIZER = {"group_size": 32, "spacing": "quadratic", "gap_ratio": 2.7, "rounding": "correlated"}


def small_layout(
    rows: int,
    widths: tuple[int, ...] = (0, 2, 4, 5, 8),
    bits: float = 4.3,
    num_chunks: int = 2,
    **changes,
) -> Layout:
    """Layout of chunks of `rows` rows with codes of `bits` bits."""
    return Layout(
        size=num_chunks * rows * 256,
        num_chunks=num_chunks,
        code_bits=bits,
        allocation=Allocation(widths, 1.0),
        quantizer=Quantizer(**{**QUANTIZER, **changes}),
    )


def some_rows(layout: Layout, dtype="float32", seed: int = 0) -> LocalRows:
    """Rows of any norm in random places, but widths that fit those norms."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(layout.num_rows, 256))
    rows *= np.exp(3 * rng.normal(size=(layout.num_rows, 1)))
    rng = np.random.default_rng(1)
    shape = layout.num_chunks, layout.rows_per_chunk
    order = rng.permutation(layout.num_rows).reshape(shape).astype(np.int32)
    energies = -np.sort(-rng.integers(0, 1000, shape), axis=1).astype(np.int32)
    plane_rows = layout.allocation.solve(jnp.asarray(energies), layout.units)
    places = make_places(jnp.asarray(order), plane_rows)
    return LocalRows(jnp.asarray(rows, jnp.float32).astype(dtype), places, SEED)


def some_messages(layout: Layout, dtype: str, chunk: int, count: int) -> jax.Array:
    """Messages that as many other workers would send of a chunk."""
    compress = functools.partial(operations.compress, layout=layout, implementation="xla")
    send = jax.jit(lambda local: compress(local, chunk, 0))
    messages = [send(some_rows(layout, dtype, seed)) for seed in range(count)]
    return jnp.stack(messages) if count else jnp.zeros((0, layout.payload_bytes), jnp.uint8)


def run(backend: str, operation, *args, **static):
    """Run an operation by the kernels, interpreted, or by the base."""
    with modes.without_gpu("interpret"):
        jitted = jax.jit(functools.partial(choice.run, backend, operation, **static))
        return jax.tree.map(np.asarray, jitted(*args))
