"""A method with a metric of its own: for tests of metrics that do not depend on the method."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.methods import Call, Exact, Reduced, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingZeros(Exact):
    """The exact sum, and the share of its coordinates that are zero."""

    metrics = ("zeros",)

    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        reduced = super().all_reduce(flat, call, key, state)
        zeros = lax.pmean(jnp.mean((flat == 0).astype(jnp.float32)), call.axis.name)
        return dataclasses.replace(reduced, metrics={"zeros": zeros})
