"""Arguments of a loss function: which are differentiated, split over workers, whole, or static."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_jax._api import modules

DIFFERENTIATED, SPLIT, WHOLE, STATIC = "differentiated", "split", "whole", "static"
Arrays = Mapping[str, list[Any]]  # role to the leaves that have it


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles of arguments, as a user gives them."""

    argnums: tuple[int, ...]  # positions that are differentiated
    whole: tuple[int | str, ...]  # positions and names that every worker gets whole
    static: tuple[int | str, ...]  # positions and names that are not arrays

    def of(self, where: int | str) -> str:
        """Return the role of an argument's arrays."""
        if where in self.argnums:
            return DIFFERENTIATED
        if where in self.static:
            return STATIC
        return WHOLE if where in self.whole else SPLIT


class ModuleParts(NamedTuple):
    """An nnx module without its structure."""

    params: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Signature:
    """Everything about the arguments of one call that is not an array. It is hashable."""

    argnums: tuple[int, ...]
    structure: Any  # of (args, kwargs), with parts in place of modules
    roles: tuple[str, ...]  # of every leaf
    names: tuple[str, ...]  # of every leaf, for errors
    static: tuple[Any, ...]  # leaves that are no arrays
    graphs: tuple[tuple[int | str, Any], ...]  # arguments that are modules, and their structures

    def rebuild(self, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments of a call, with parts in place of modules, from leaves by role."""
        left = {role: iter(leaves) for role, leaves in arrays.items()} | {STATIC: iter(self.static)}
        args, kwargs = jax.tree.unflatten(self.structure, [next(left[role]) for role in self.roles])
        return list(args), kwargs

    def differentiated(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the trees that gradients are like."""
        return tuple(
            args[n].params if isinstance(args[n], ModuleParts) else args[n] for n in self.argnums
        )


def sort(
    args: Sequence[Any], kwargs: Mapping[str, Any], roles: Roles
) -> tuple[Signature, dict[str, list[Any]]]:
    """Sort the leaves of the arguments of a call by role.

    Floating leaves of a differentiated argument are differentiated, the others are whole. Numbers
    and other scalars are whole, and what is neither an array nor a number is static.

    Raises:
      ValueError: a static value that cannot be hashed.
    """
    graphs: list[tuple[int | str, Any]] = []

    def without_structure(where: int | str, value: Any) -> Any:
        if not modules.is_module(value):
            return value
        graph, params, rest = modules.split(value)
        graphs.append((where, graph))
        return ModuleParts(params, rest)

    parted = (
        tuple(without_structure(n, value) for n, value in enumerate(args)),
        {name: without_structure(name, value) for name, value in kwargs.items()},
    )
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(parted)
    arrays: dict[str, list[Any]] = {DIFFERENTIATED: [], SPLIT: [], WHOLE: []}
    found: list[str] = []
    static: list[Any] = []
    names: list[str] = []
    for path, leaf in paths_and_leaves:
        where = path[1].idx if path[0].idx == 0 else path[1].key
        is_rest = path[2:3] == (jax.tree_util.GetAttrKey("rest"),)
        is_module = any(where == other for other, _ in graphs)
        role = _role_of_leaf(leaf, roles.of(where), is_whole=is_module and is_rest)
        if is_module and role == SPLIT:
            role = WHOLE
        found.append(role)
        names.append(f"argument {where!r}{jax.tree_util.keystr(path[2:])}")
        (static if role == STATIC else arrays[role]).append(leaf)
    for value in static:
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"{value!r:.80} is neither an array nor a number, and cannot be hashed. Give an "
                "array, or a value that can be."
            ) from None
    signature = Signature(
        roles.argnums, structure, tuple(found), tuple(names), tuple(static), tuple(graphs)
    )
    return signature, arrays


def _role_of_leaf(leaf: Any, role: str, *, is_whole: bool) -> str:
    if role == STATIC or not (hasattr(leaf, "dtype") or isinstance(leaf, numbers.Number)):
        return STATIC
    if role == DIFFERENTIATED:
        dtype = jnp.result_type(leaf)
        return WHOLE if is_whole or not jnp.issubdtype(dtype, jnp.floating) else DIFFERENTIATED
    return WHOLE if is_whole or np.ndim(leaf) == 0 else role
