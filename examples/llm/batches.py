"""Which rows a step sees: a function of seed and step, so that a resumed run needs no other state.

Every process has all rows and hands its devices theirs.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.llm.packing import Rows


def rows_of_step(num_rows: int, *, count: int, seed: int, step: int) -> np.ndarray:
    """The rows of one step. All rows come in random order, then all in another one, and so on.

    Args:
        num_rows: Rows there are.
        count: Rows to take.
        seed: Seed of the run.
        step: Step within the run, from 0.

    Returns:
        int64 `[count]`.
    """
    epochs, places = np.divmod(np.arange(step * count, (step + 1) * count), num_rows)
    return np.array([_order(num_rows, seed, e)[p] for e, p in zip(epochs, places, strict=True)])


def place(rows: Rows, indices: np.ndarray, mesh: Mesh) -> Rows:
    """Puts rows on the devices, split over both axes of the mesh.

    Args:
        rows: All rows.
        indices: int `[rows]` or `[micro_batches, rows]`, the same in all processes; the last axis
            divides by the number of devices.
        mesh: Axes "data" and "fsdp".

    Returns:
        Rows of `[*indices.shape, context]`.
    """
    split = P(*[None] * (indices.ndim - 1), ("data", "fsdp"))
    sharding = NamedSharding(mesh, split)

    def on_devices(field: np.ndarray) -> jax.Array:
        shape = (*indices.shape, field.shape[-1])
        # Called for the devices of this process only.
        return jax.make_array_from_callback(shape, sharding, lambda part: field[indices[part[:-1]]])

    return Rows(*map(on_devices, rows))


@functools.lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
