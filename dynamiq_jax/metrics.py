"""How far an estimate is from the truth."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def vnmse(estimate: Any, truth: Any) -> Array:
    """Vector-normalised mean squared error ||estimate - truth||^2 / ||truth||^2 over all leaves of
    two like pytrees.

    Returns:
      float32 scalar; 0 if both are zero, inf if only the truth is.

    >>> import jax.numpy as jnp
    >>> float(vnmse({"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([1.0, 1.0])}))
    0.5
    """
    structures = [str(jax.tree.structure(tree)) for tree in (estimate, truth)]
    if structures[0] != structures[1]:
        raise ValueError(
            f"estimate has structure {structures[0]} and truth has {structures[1]}. Give two like "
            "trees."
        )
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (estimate, truth)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"estimate has shapes {shapes[0]} and truth has {shapes[1]}. Give like trees."
        )
    pairs = list(zip(jax.tree.leaves(estimate), jax.tree.leaves(truth), strict=True))
    # Scaled by the largest magnitude: squares of 1e-30 would underflow.
    scale = jnp.max(
        jnp.stack([jnp.float32(0), *(jnp.max(jnp.abs(_float(t)), initial=0) for _, t in pairs)])
    )
    inverse = jnp.where(scale > 0, 1 / scale, jnp.float32(1))
    error = sum(
        (jnp.sum(((_float(e) - _float(t)) * inverse) ** 2) for e, t in pairs), jnp.float32(0)
    )
    norm = sum((jnp.sum((_float(t) * inverse) ** 2) for _, t in pairs), jnp.float32(0))
    return jnp.where(error == 0, jnp.float32(0), error / norm)


def _float(leaf: Any) -> Array:
    return jnp.asarray(leaf).astype(jnp.float32)
