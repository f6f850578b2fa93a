"""Two methods that the library does not have, to show that its interface has room for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.chunks import SummedChunks, WireCost, as_chunks
from dynamiq_jax.methods.base import ChunkedMethod, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntegerSum(ChunkedMethod):
    """Homomorphic: all workers share one scale, so that their integers can be summed as they are.

    A hop is an addition and nothing is ever rounded twice.
    """

    total: int = 2**15 - 1  # largest sum that a 16-bit word holds

    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost:
        one_scalar = 4 * 2 * (num_workers - 1) // num_workers
        return WireCost(payload_bytes=2 * -(-size // num_chunks), statistics_bytes=one_scalar)

    def bind(self, flat, axis_name, num_workers, num_chunks, key, *, consecutive=False):
        flat = flat.astype(jnp.float32)
        levels = np.float32(self.total // num_workers - 1)
        step = lax.pmax(jnp.max(jnp.abs(flat)), axis_name) / levels
        own_key = jax.random.fold_in(key, lax.axis_index(axis_name))
        noise = jax.random.uniform(own_key, flat.shape)
        codes = jnp.floor(flat / jnp.where(step > 0, step, 1) + noise).astype(jnp.int16)
        return SummedChunks(
            encoded=as_chunks(codes, num_chunks),
            decode=lambda sums: sums.astype(jnp.float32) * step,
            size=flat.size,
        )


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
