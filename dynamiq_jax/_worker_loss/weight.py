"""Weight of a worker in a mean over workers, by the number of its targets."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Weight(NamedTuple):
    """Weight of a worker, and whether it takes part in the mean at all.

    A worker without targets takes no part, whatever its loss is, which may be 0/0. If no worker has
    targets, all of them take part with a weight of zero: the mean is then zero, or NaN if that of
    one device is.
    """

    share: Array  # float32 scalar, whose mean over workers is 1
    takes_part: Array  # bool scalar

    def of(self, value: Array) -> Array:
        """Return a value of this worker times its weight."""
        weighted = value * self.share.astype(value.dtype)
        return jnp.where(self.takes_part, weighted, jnp.zeros_like(weighted))

    def mask_gradients(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the same leaves, whose gradients are zero if the worker takes no part.

        The derivative of 0/0 is NaN also where its cotangent is zero. So the gradients themselves
        are masked: the transpose of a selection is one.
        """
        return [jnp.where(self.takes_part, leaf, lax.stop_gradient(leaf)) for leaf in leaves]
