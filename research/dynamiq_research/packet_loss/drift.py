"""Drift between the parameters of workers, as it is and as it is expected."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.parts import check_integer, check_number
from dynamiq_jax.parts.collectives import find_axes, named_leaves


def drift(tree: Any, axis_name: str) -> Array:
    """Compute the mean squared difference between two workers' values of a pytree.

    Call it inside `jax.shard_map`, or inside `jax.vmap(..., axis_name=...)`. It takes two exact
    sums over the axis, as large as the tree.

    Args:
      tree: pytree of floating arrays, such as parameters after `LossyCollectives.broadcast`.
      axis_name: axis of the workers; one.

    Returns:
      float32 scalar, the same on all workers: the mean over all coordinates and all pairs of
      different workers. 0 where all workers have the same values.

    >>> import jax, jax.numpy as jnp
    >>> of_workers = jax.vmap(lambda x: drift(x, "data"), axis_name="data")
    >>> of_workers(jnp.array([[1.0, 2.0], [1.0, 5.0]]))[0].item()
    4.5
    """
    axis = find_axes(axis_name, single=True).slow
    leaves = [leaf for _, leaf in named_leaves(tree)[0]]
    size = sum(leaf.size for leaf in leaves)
    if not size or axis.size == 1:
        return jnp.float32(0)
    flat = jnp.concatenate([leaf.reshape(-1).astype(jnp.float32) for leaf in leaves])
    # From one of the workers: the mean of equal numbers would round to another one.
    first = lax.psum(jnp.where(axis.index == 0, flat, np.float32(0)), axis_name)
    deviation = flat - first
    mean = lax.pmean(deviation, axis_name)
    total = lax.psum(jnp.mean((deviation - mean) ** 2), axis_name)
    return total * np.float32(2 / (axis.size - 1))


def expected_drift(
    rate: float, num_workers: int, *, variance: float = 1.0, mean: float = 0.0
) -> float:
    """Return the drift that broadcast parameters settle at, if steps are independent.

    The age of a value is geometric: `a` steps with the probability `(1 - p) p**a`. Between two
    workers that do not own a coordinate, the mean squared difference is `2 p / (1 - p**2)` times
    the variance of a step. Between one that does and one that does not, it is `p / (1 - p)` times
    that. A mean of the steps adds its square times `2 p / (1 - p)**2`, or `p (1 + p) / (1 - p)**2`.
    The result is the mean over all pairs, as in `drift`.

    Args:
      rate: share of the packets that are lost, below 1.
      num_workers: number of workers, 2 or more.
      variance: of a coordinate's change in one step.
      mean: of a coordinate's change in one step.

    >>> round(expected_drift(0.1, 10**9), 4), round(expected_drift(0.1, 8), 4)
    (0.202, 0.1793)
    """
    check_number("rate", rate, 0, np.nextafter(1, 0), "0 to less than 1")
    check_integer("num_workers", num_workers, 2)
    with_owner = 2 / num_workers  # share of the pairs
    of_others = 2 * rate * (variance / (1 - rate**2) + mean**2 / (1 - rate) ** 2)
    of_owner = rate * (variance / (1 - rate) + mean**2 * (1 + rate) / (1 - rate) ** 2)
    return with_owner * of_owner + (1 - with_owner) * of_others
