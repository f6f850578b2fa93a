"""Arguments of a loss function: which are differentiated, split over workers, whole, or static."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
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

    given: int | tuple[int, ...]  # position or positions that are differentiated
    whole: tuple[int | str, ...]  # positions and names that every worker gets whole
    static: tuple[int | str, ...]  # positions and names that are not arrays
    parameters: tuple[str, ...]  # names of the positions, as far as known

    @staticmethod
    def of_arguments(
        function: Callable[..., Any],
        argnums: int | Sequence[int],
        replicated_argnums: int | Sequence[int],
        replicated_argnames: str | Sequence[str],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
    ) -> "Roles":
        """Make roles of the arguments of a function, as for `value_and_grad`."""
        return Roles(
            given=argnums if isinstance(argnums, int) else tuple(argnums),
            whole=(*_as_tuple(replicated_argnums), *_as_tuple(replicated_argnames)),
            static=(*_as_tuple(static_argnums), *_as_tuple(static_argnames)),
            parameters=_parameters(function),
        )

    @property
    def argnums(self) -> tuple[int, ...]:
        """Positions that are differentiated, in ascending order."""
        return tuple(sorted(_as_tuple(self.given)))

    def sort(self, values: Any) -> tuple[Any, ...]:
        """Return values that a user gave for the differentiated arguments by position."""
        if isinstance(self.given, int):
            return (values,)
        by_position = dict(zip(self.given, values, strict=True))
        return tuple(by_position[position] for position in self.argnums)

    def unsort(self, values: Sequence[Any]) -> Any:
        """Return values by position as a user wants them."""
        if isinstance(self.given, int):
            return values[0]
        by_position = dict(zip(self.argnums, values, strict=True))
        return tuple(by_position[position] for position in self.given)

    def of(self, where: int | str) -> str:
        """Return the role of an argument's arrays."""
        if where in self.argnums:
            return DIFFERENTIATED
        known = {where}
        if isinstance(where, int):
            known |= set(self.parameters[where : where + 1])
        if known & set(self.static):
            return STATIC
        return WHOLE if known & set(self.whole) else SPLIT

    def check(self, count: int, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for roles of arguments that a call does not have, or of two kinds."""
        given = {
            "argnums": self.argnums,
            "replicated_argnums": [where for where in self.whole if isinstance(where, int)],
            "static_argnums": [where for where in self.static if isinstance(where, int)],
        }
        for argument, positions in given.items():
            for position in positions:
                if not 0 <= position < count:
                    raise ValueError(
                        f"{argument} names position {position}, but there are {count} arguments. "
                        f"Give positions from 0 to {count - 1}."
                    )
        for name in (where for where in (*self.whole, *self.static) if isinstance(where, str)):
            if name not in kwargs and name not in self.parameters:
                raise ValueError(
                    f"replicated_argnames or static_argnames names {name!r}, but the keyword "
                    f"arguments are {sorted(kwargs)}. Give their names."
                )
        used = [*self.argnums, *self.whole, *self.static]
        for where in used:
            if used.count(where) > 1:
                raise ValueError(
                    f"Argument {where!r} is given twice in argnums, replicated_ and static_ "
                    "arguments. Give it once."
                )


class ModuleParts(NamedTuple):
    """An nnx module without its structure."""

    params: Any
    rest: Any


@dataclasses.dataclass(frozen=True)
class Signature:
    """Everything about the arguments of one call that is not an array.

    It is hashable, unless the structure of a module has metadata that is not.
    """

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

    def differentiated(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return the trees that gradients are like, by position."""
        args, _ = self.rebuild(arrays)
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


def by_position(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, by position where the function has one for them."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or one that the call does not fit
        return tuple(args), dict(kwargs)
    bound.apply_defaults()  # behind a gap, arguments would stay named
    return bound.args, bound.kwargs


def alone(trees: Sequence[Any]) -> Any:
    """Return the only tree of several, else all: names in errors and masks are those of a user."""
    return trees[0] if len(trees) == 1 else tuple(trees)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of a function, as far as known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins and C functions
        return ()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name for p in parameters if p.kind in kinds)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, int | str) else tuple(given)


def _role_of_leaf(leaf: Any, role: str, *, is_whole: bool) -> str:
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")  # a configuration may have one
    if role == STATIC or not (is_array or isinstance(leaf, numbers.Number)):
        return STATIC
    if role == DIFFERENTIATED:
        dtype = jnp.result_type(leaf)
        return WHOLE if is_whole or not jnp.issubdtype(dtype, jnp.floating) else DIFFERENTIATED
    return WHOLE if is_whole or np.ndim(leaf) == 0 else role
