"""Rows of each step: a function of seed and step, so that a resumed run needs no other state."""

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llm.packing import Rows


def rows_of_step(num_rows: int, *, count: int, seed: int, step: int) -> np.ndarray:
    """Choose the rows of a step. Each epoch takes all rows once, in a random order of its own.

    Args:
      num_rows: number of rows.
      count: number of rows to choose.
      seed: seed of the run.
      step: step within the run, from 0.

    Returns:
      int64 `[count]`.
    """
    epochs, places = np.divmod(np.arange(step * count, (step + 1) * count), num_rows)
    return np.array([_order(num_rows, seed, e)[p] for e, p in zip(epochs, places, strict=True)])


def place(rows: Rows, indices: np.ndarray, mesh: Mesh) -> Rows:
    """Put rows on the devices, split over both axes of the mesh.

    Args:
      rows: all rows, which each process has.
      indices: int `[rows]` or `[micro_batches, rows]`, the same in all processes; the size of the
        last axis is a multiple of the number of devices.
      mesh: mesh with axes "data" and "fsdp".

    Returns:
      Rows of `[*indices.shape, context]`.
    """
    split = P(*[None] * (indices.ndim - 1), ("data", "fsdp"))
    sharding = NamedSharding(mesh, split)

    def on_devices(field: np.ndarray) -> jax.Array:
        shape = (*indices.shape, field.shape[-1])
        # JAX calls this for the devices of this process only.
        return jax.make_array_from_callback(shape, sharding, lambda part: field[indices[part[:-1]]])

    return Rows(*map(on_devices, rows))


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the rows in an epoch."""
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
