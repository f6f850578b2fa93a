"""Workers of one mesh or vmap axis, and the collectives between them."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import compat

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Axis:
    """The workers of one axis."""

    name: str
    size: int

    @property
    def index(self) -> Array:
        """Index of this worker, int32 scalar."""
        return lax.axis_index(self.name)

    def shift(self, tree: Tree, step: int) -> Tree:
        """Send arrays to the worker `step` places further on, around the end."""
        to = [(source, (source + step) % self.size) for source in range(self.size)]
        return lax.ppermute(tree, self.name, to)

    def swap(self, tree: Tree, distance: int) -> Tree:
        """Exchange arrays with the worker whose index differs by XOR `distance`."""
        to = [(source, source ^ distance) for source in range(self.size)]
        return lax.ppermute(tree, self.name, to)

    def exchange(self, shares: Array) -> Array:
        """Send row w of [workers, ...] to worker w; row w of the result comes from worker w."""
        return lax.all_to_all(shares, self.name, split_axis=0, concat_axis=0)

    def exchange_parts(self, shares: Array) -> Array:
        """Do what `exchange` does with the equal parts of a vector."""
        return lax.all_to_all(shares, self.name, split_axis=0, concat_axis=0, tiled=True)

    def gather(self, value: Array) -> Array:
        """Gather an array of every worker, [workers, *shape], the same bits on all workers."""
        return compat.all_gather(value, self.name)

    def reduce_by_owners(self, shares: Array, combine: Callable[[Array], Array]) -> Array:
        """Reduce small numbers to the same bits on all workers.

        The order in which a backend adds them up has no effect. Worker w owns the w-th share. It
        combines that share of all workers, and all workers gather the results.

        Args:
          shares: [workers, ...], a share for each owner.
          combine: function of one share of all workers, [workers, ...], to their combination.

        Returns:
          Combined shares of all owners, [workers, ...].
        """
        # Under jax.vmap, JAX cannot exchange a value that is the same for all workers.
        own = jnp.where(self.index < 0, jnp.zeros_like(shares), shares)
        return self.gather(combine(self.exchange(own)))

    def owners_bytes(self, share: int, combined: int) -> int:
        """Return the bytes that each worker sends in `reduce_by_owners`.

        Args:
          share: bytes of one share.
          combined: bytes of its combination.
        """
        return (self.size - 1) * (share + combined)
