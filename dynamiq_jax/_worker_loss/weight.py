"""Weight of a worker in a mean over workers, by the number of its targets."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Weight(NamedTuple):
    """Weight of a worker, and whether it takes part in the mean.

    A worker without targets takes no part, even if its loss is 0/0. If no worker has targets, all
    workers take part with a weight of zero. The mean is then zero, or NaN if one loss is.
    """

    share: Array  # float32 scalar, whose mean over workers is 1
    takes_part: Array  # bool scalar

    def of(self, value: Array) -> Array:
        """Return a value of this worker times its weight."""
        weighted = value * self.share.astype(value.dtype)
        return jnp.where(self.takes_part, weighted, jnp.zeros_like(weighted))

    def mask_gradients(self, leaves: list[Array]) -> list[Array]:
        """Return the same leaves, with finite gradients if the worker takes no part.

        The derivative of 0/0 is NaN also where its cotangent is zero. So gradients that are not
        finite become zero. Finite gradients are kept: they may come from aux, which has weights of
        its own.
        """
        return _masked(leaves, self.takes_part)


@jax.custom_vjp
def _masked(leaves: list[Array], takes_part: Array) -> list[Array]:
    del takes_part
    return leaves


def _backward(takes_part: Array, cotangents: list[Array]) -> tuple[list[Array], None]:
    return [
        jnp.where(takes_part | jnp.isfinite(each), each, jnp.zeros_like(each))
        for each in cotangents
    ], None


_masked.defvjp(lambda leaves, takes_part: (leaves, takes_part), _backward)
