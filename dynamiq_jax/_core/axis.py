"""Workers of one mesh or vmap axis, and the collectives between them."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._jax import compat

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

    def exchange(self, shares: Array, *, tiled: bool = False) -> Array:
        """Send row w of [workers, ...] to worker w; row w of the result comes from worker w.

        With `tiled`, rows are the equal parts of a vector.
        """
        return lax.all_to_all(shares, self.name, split_axis=0, concat_axis=0, tiled=tiled)

    def gather(self, value: Array, *, tiled: bool = False) -> Array:
        """Gather an array of every worker, [workers, *shape], the same bits on all workers.

        With `tiled`, vectors are gathered in one.
        """
        return compat.all_gather(value, self.name, tiled=tiled)

    def sum_scatter(self, values: Array, dimension: int = 0, *, tiled: bool) -> Array:
        """Sum exactly, like `lax.psum_scatter`.

        CPUs exchange the parts and add them up in the order of the workers: the reduce-scatter of
        gloo alone fails where a process is 30 s late. The bytes are the same.
        """

        def own_sum(values: Array) -> Array:
            if not values.size:  # JAX exchanges nothing in another shape, under vmap
                return fused(values)
            before, after = values.shape[:dimension], values.shape[dimension + 1 :]
            part = (values.shape[dimension] // self.size,) if tiled else ()
            parts = values.reshape(*before, self.size, *part, *after)
            return jnp.sum(self._exchange_own(jnp.moveaxis(parts, dimension, 0)), 0, values.dtype)

        def fused(values: Array) -> Array:
            return lax.psum_scatter(values, self.name, scatter_dimension=dimension, tiled=tiled)

        return lax.platform_dependent(values, cpu=own_sum, default=fused)

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
        return self.gather(combine(self._exchange_own(shares)))

    def _exchange_own(self, shares: Array) -> Array:
        """Exchange values that may be the same for all workers, which JAX cannot under vmap."""
        return self.exchange(jnp.where(self.index < 0, jnp.zeros_like(shares), shares))

    def owners_bytes(self, share: int, combined: int) -> int:
        """Return the bytes that each worker sends in `reduce_by_owners`.

        Args:
          share: bytes of one share.
          combined: bytes of its combination.
        """
        return (self.size - 1) * (share + combined)
