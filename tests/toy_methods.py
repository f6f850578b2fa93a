"""A method that the library does not have, to show that its interface has room for it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.methods.base import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Method):
    """Stateful: what a worker's coarse quantizer leaves out is added to its next gradient."""

    inner: Method
    keep: float = 0.1  # values below this share of the worker's largest wait for their turn

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        return self.inner.wire_cost(size, num_workers, num_chunks)

    def init_state(self, size: int, num_workers: int) -> Array:
        return jnp.zeros(size, jnp.float32)

    def all_reduce(self, flat, axis_name, num_workers, *, topology, key, state):
        wanted = flat.astype(jnp.float32) + state
        large = jnp.abs(wanted) >= jnp.max(jnp.abs(wanted)) * np.float32(self.keep)
        applied = jnp.where(large, wanted, np.float32(0))
        total, _ = self.inner.all_reduce(
            applied, axis_name, num_workers, topology=topology, key=key, state=()
        )
        return total, wanted - applied
