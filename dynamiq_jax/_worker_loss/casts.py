"""Casts whose transpose is a collective: gradients are reduced where they are taken."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding

from dynamiq_jax._buckets import order
from dynamiq_jax._inputs.shards import has_explicit_axes


@dataclasses.dataclass(frozen=True)
class Cast:
    """A cast of a tree of parameters to parameters of each worker, and its transpose.

    In the tree that `sum` takes, leaves that are not differentiated have dtype float0.
    """

    spread: Callable[[Any], Any]  # parameters to parameters of each worker, of the same values
    sum: Callable[[Any, Array], Any]  # cotangents of the workers, and a key, to their sums
    key_of: Callable[[Any], Array]  # parameters to a PRNG key

    def __call__(
        self, tree: Any, key: Array | None, salt: Array | None, ticket: Array | None = None
    ) -> tuple[Any, Array | None]:
        """Cast a tree. Only leaves that are differentiated are sent.

        Args:
          tree: pytree of arrays.
          key: PRNG key; None for a key from the tree.
          salt: further number that a key from the tree depends on, uint32 scalar, or None.
          ticket: zero whose cotangent carries the order of collectives, float32 scalar, or None;
            see `order.enter`.

        Returns:
          The cast tree, and the ticket.
        """

        @jax.custom_vjp
        def cast(
            tree: Any, key: Array | None, salt: Array | None, ticket: Array | None
        ) -> tuple[Any, Array | None]:
            del key, salt
            return self.spread(tree), ticket

        def forward(
            tree: Any, key: Any, salt: Any, ticket: Any
        ) -> tuple[Any, tuple[_Differentiated, Array]]:
            primals, structure = jax.tree.flatten(tree)
            flags = tuple(primal.perturbed for primal in primals)
            placed = tuple(jax.typeof(primal.value).sharding for primal in primals)
            differentiated = _Differentiated(flags, placed)
            values = jax.tree.unflatten(structure, [primal.value for primal in primals])
            if key is None:
                step_key = self.key_of(values)
                step_key = step_key if salt is None else jax.random.fold_in(step_key, salt.value)
            else:
                step_key = key.value
            kept = None if ticket is None else ticket.value
            return (self.spread(values), kept), (differentiated, step_key)

        def backward(
            residuals: tuple[_Differentiated, Array], cotangents: tuple[Any, Any]
        ) -> tuple[Any, None, None, Array | None]:
            differentiated, key = residuals
            of_tree, of_ticket = cotangents
            if not _is_zero(of_ticket):
                order.remember(of_ticket)
            summed = self.sum(differentiated.only(of_tree), key)
            token = None if of_ticket is None else order.last_token()
            return differentiated.placed(summed), None, None, token

        cast.defvjp(forward, backward, symbolic_zeros=True)
        return cast(tree, key, salt, ticket)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Differentiated:
    """Flags of the leaves of a tree that are differentiated, and shardings in their types."""

    flags: tuple[bool, ...]
    shardings: tuple[NamedSharding, ...]

    def only(self, tree: Any) -> Any:
        """Return a tree with dtype float0 for symbolic zeros and for leaves without gradients."""
        leaves, structure = jax.tree.flatten(tree, is_leaf=_is_zero)
        kept = [
            leaf if flag and not _is_zero(leaf) else np.zeros(leaf.shape, jax.dtypes.float0)
            for leaf, flag in zip(leaves, self.flags, strict=True)
        ]
        return jax.tree.unflatten(structure, kept)

    def placed(self, tree: Any) -> Any:
        """Return sums with the shardings of explicit leaves; None for float0."""
        leaves, structure = jax.tree.flatten(tree)
        placed = [
            _placed(leaf, sharding) for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    if leaf.dtype == jax.dtypes.float0:
        return None
    # Arrays of an explicit mesh have its shardings in their types, also outside of jax.set_mesh.
    is_explicit = has_explicit_axes(sharding.mesh)
    return jax.sharding.reshard(leaf, sharding) if is_explicit else leaf
