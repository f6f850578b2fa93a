"""Error of an estimate."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.codec.rows import LARGEST_UNIT, inverse_unit


def vnmse(estimate: Any, truth: Any) -> Array:
    """Compute the vector-normalized mean squared error of a pytree.

    This is ||estimate - truth||^2 / ||truth||^2, over all leaves.

    Args:
      estimate: pytree of real or complex arrays, taken as float32 or complex64.
      truth: the same structure and shapes.

    Returns:
      float32 scalar; 0 if both are zero, inf if only the truth is.

    Raises:
      ValueError: structures or shapes differ.

    >>> import jax.numpy as jnp
    >>> float(vnmse({"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([1.0, 1.0])}))
    0.5
    """
    for what, of in (
        ("structure", jax.tree.structure),
        ("shapes", lambda tree: [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]),
    ):
        ours, theirs = str(of(estimate)), str(of(truth))
        if ours != theirs:
            raise ValueError(
                f"estimate has {what} {ours} and truth has {theirs}. Give two like trees."
            )
    return _of_leaves(jax.tree.leaves(estimate), jax.tree.leaves(truth))


@jax.jit
def _of_leaves(estimate: list[Any], truth: list[Any]) -> Array:
    pairs = [_numbers(*pair) for pair in zip(estimate, truth, strict=True)]
    # Scaled by the largest magnitude: squares of 1e-30 would underflow, and differences overflow.
    scale = jnp.max(jnp.stack([jnp.float32(0), *(jnp.max(abs(t), initial=0) for _, t in pairs)]))
    inverse = inverse_unit(jnp.minimum(scale, LARGEST_UNIT))
    zero = jnp.float32(0)
    errors = [e * inverse - t * inverse for e, t in pairs]
    error = sum((jnp.sum(e**2) for e in errors), zero)
    norm = sum((jnp.sum((t * inverse) ** 2) for _, t in pairs), zero)
    differs = sum((jnp.any(e != 0) for e in errors), jnp.bool_(False))
    of_zeros = jnp.where(differs, jnp.float32(jnp.inf) + error, zero)  # or NaN
    return jnp.where(norm == 0, of_zeros, error / norm)


def _numbers(*leaves: Any) -> list[Array]:
    """Convert leaves to float32. If one is complex, all become real and imaginary parts."""
    arrays = list(map(jnp.asarray, leaves))
    if any(map(jnp.iscomplexobj, arrays)):
        arrays = [jnp.stack([array.real, array.imag]) for array in arrays]
    return [array.astype(jnp.float32) for array in arrays]
