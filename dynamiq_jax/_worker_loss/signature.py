"""Signature of a call of a loss function: everything about its arguments that is not an array."""

import dataclasses
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.batch import resolve_batch
from dynamiq_jax._worker_loss.in_specs import axes_of
from dynamiq_jax._worker_loss.roles import (
    DIFFERENTIATED,
    SPLIT,
    STATIC,
    WHOLE,
    ArgumentLeaf,
    Arrays,
    Roles,
    role_of_leaf,
)
from dynamiq_jax._worker_loss.rows import Split
from dynamiq_jax._worker_loss.static import Static, static_value


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
    specs: tuple[PartitionSpec | None, ...]  # of every leaf; of the batch, none is None
    rules: tuple[Split | None, ...]  # of the rows of every leaf; None for neighboring ones
    static: tuple[Static, ...]  # leaves that are no arrays
    graphs: tuple[tuple[int | str, Any], ...]  # arguments that are modules, and their structures

    @property
    def splits(self) -> list[PartitionSpec]:
        """Specs of the leaves of the batch."""
        return self.of_batch(self.specs)

    def of_batch(self, values: Sequence[Any]) -> list[Any]:
        """Return those values of every leaf that are of leaves of the batch."""
        return [value for value, role in zip(values, self.roles, strict=True) if role == SPLIT]

    def rebuild(
        self, arrays: Arrays, worker: Array | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call, by position and by name, from leaves by role.

        Args:
          arrays: leaves by role.
          worker: index of the worker whose random keys modules get, int32 scalar; None for keys as
            they are.
        """
        args, kwargs = self._parted(arrays)
        for where, graph in self.graphs:
            container: Any = args if isinstance(where, int) else kwargs
            parts = container[where]
            container[where] = modules.merge(graph, parts.params, parts.rest, worker)
        return args, kwargs

    def modules_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return those of some arguments that are modules, or parts of modules."""
        return [args[at] if isinstance(at, int) else kwargs[at] for at, _ in self.graphs]

    def rests(self, arrays: Arrays) -> list[Any]:
        """Return the state of every module besides its parameters, from leaves by role."""
        return [parts.rest for parts in self.modules_in(*self._parted(arrays))]

    def differentiated(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return the differentiated trees, by position, with None in place of static leaves."""
        args, _ = self._filled({**arrays, STATIC: [None] * len(self.static)})
        return tuple(
            args[n].params if isinstance(args[n], ModuleParts) else args[n] for n in self.argnums
        )

    def _parted(self, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments with parts in place of modules."""
        return self._filled({**arrays, STATIC: [static.value for static in self.static]})

    def _filled(self, leaves: Arrays) -> tuple[list[Any], dict[str, Any]]:
        left = {role: iter(of_role) for role, of_role in leaves.items()}
        args, kwargs = jax.tree.unflatten(self.structure, [next(left[role]) for role in self.roles])
        return list(args), kwargs


def sort_by_role(
    args: Sequence[Any], kwargs: Mapping[str, Any], roles: Roles, axes: Mapping[str, int]
) -> tuple[Signature, dict[str, list[Any]]]:
    """Sort the leaves of the arguments of a call by role.

    Floating and complex leaves of a differentiated argument are differentiated, and its other
    arrays are whole. Numbers and other scalars are whole, and values that are neither arrays nor
    numbers are static. In equinox modules, numbers are static too: Python branches on them.

    Args:
      args: arguments by position.
      kwargs: arguments by name.
      roles: roles of the arguments.
      axes: axes of the workers, and their sizes.

    Returns:
      The signature, and the leaves by role.

    Raises:
      ValueError: a static value that cannot be hashed; specs that do not fit an argument, or that
        split one that is not split; arrays of the batch that do not split over the workers.
    """
    graphs: list[tuple[int | str, Any]] = []

    def without_structure(where: int | str, value: Any) -> Any:
        if not modules.is_module(value):
            return value
        graph, params, rest = modules.split_module(value)
        graphs.append((where, graph))
        return ModuleParts(params, rest)

    parted = (
        tuple(without_structure(n, value) for n, value in enumerate(args)),
        {name: without_structure(name, value) for name, value in kwargs.items()},
    )
    structure = jax.tree.structure(parted)
    leaves = resolve_batch(list(_leaves(parted, roles)), structure, roles.parameters, axes)
    arrays: dict[str, list[Any]] = {DIFFERENTIATED: [], SPLIT: [], WHOLE: []}
    static: list[Static] = []
    for leaf in leaves:
        if leaf.role == STATIC:
            static.append(static_value(leaf.name, leaf.value))
        else:
            arrays[leaf.role].append(leaf.value)
    signature = Signature(
        argnums=roles.argnums,
        structure=structure,
        roles=tuple(leaf.role for leaf in leaves),
        names=tuple(leaf.name for leaf in leaves),
        specs=tuple(leaf.spec for leaf in leaves),
        rules=tuple(leaf.rule for leaf in leaves),
        static=tuple(static),
        graphs=tuple(graphs),
    )
    return signature, arrays


def _leaves(parted: tuple[tuple[Any, ...], dict[str, Any]], roles: Roles) -> Iterator[ArgumentLeaf]:
    """Yield the leaves of `(args, kwargs)`, with parts in place of modules, in flattened order."""
    values: dict[int | str, Any] = dict(enumerate(parted[0]))
    values.update(parted[1])
    specs = {where: iter(roles.specs_of(where, value)) for where, value in values.items()}
    rules = {where: iter(roles.rules_of(where, value)) for where, value in values.items()}
    numbers_static = {where for where, value in values.items() if modules.holds_equinox(value)}
    for path, leaf in jax.tree.leaves_with_path(parted):
        where = path[1].idx if path[0].idx == 0 else path[1].key
        is_module = isinstance(values[where], ModuleParts)
        is_rest = path[2:3] == (jax.tree_util.GetAttrKey("rest"),)
        spec, rule = next(specs[where]), next(rules[where])
        if is_module or roles.of(where) != SPLIT:
            kind = "a module" if is_module else roles.of(where)
            roles.check_whole(where, kind, spec, rule)
        if where in numbers_static and isinstance(leaf, numbers.Number):
            role = STATIC
        else:
            role = role_of_leaf(leaf, roles.of(where), is_whole=is_module and is_rest)
        if role == SPLIT and (is_module or not (spec is None or axes_of(spec))):
            role = WHOLE
        name = f"argument {where!r}{jax.tree_util.keystr(path[2:])}"
        yield ArgumentLeaf(name, role, spec, rule or roles.rule, leaf)
