"""Arguments of a loss function: which are differentiated, split over workers, whole, or static."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.in_specs import Entries, axes_of, entries_of, of_leaves, rules_of
from dynamiq_jax._worker_loss.rows import Split
from dynamiq_jax._worker_loss.static import Static, static_value

DIFFERENTIATED, SPLIT, WHOLE, STATIC = "differentiated", "split", "whole", "static"
Arrays = Mapping[str, list[Any]]  # role to the leaves that have it


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles of arguments, as a user gives them."""

    given: int | tuple[int, ...]  # position or positions that are differentiated
    in_specs: Entries  # how further arguments are split, by position or name
    rule: Split | None  # of the rows of all arrays that are split
    rules: Entries  # of those of some arguments, by position or name
    static: tuple[int | str, ...]  # positions and names that are not arrays
    parameters: tuple[str, ...]  # names of the positions, as far as known

    @staticmethod
    def of_arguments(
        function: Callable[..., Any],
        argnums: int | Sequence[int],
        in_specs: Any,
        split: Any,
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
    ) -> "Roles":
        """Make roles of the arguments of a function, as for `value_and_grad`."""
        positions = argnums if isinstance(argnums, Sequence) else (argnums,)
        if not all(isinstance(position, int) for position in positions):
            raise TypeError(
                f"argnums={argnums!r:.80} is no position. Give one, or several. For a part of an "
                "nnx module, as with nnx.DiffState, use nnx.value_and_grad of dq.data_parallel."
            )
        rule, rules = rules_of(split)
        return Roles(
            given=argnums if isinstance(argnums, int) else tuple(argnums),
            in_specs=entries_of(in_specs),
            rule=rule,
            rules=rules,
            static=(*_as_tuple(static_argnums), *_as_tuple(static_argnames)),
            parameters=_parameters(function),
        )

    @property
    def argnums(self) -> tuple[int, ...]:
        """Positions that are differentiated, in ascending order."""
        return tuple(sorted(_as_tuple(self.given)))

    def in_argnums_order(self, values: Any) -> tuple[Any, ...]:
        """Return values that a user gave for the differentiated arguments by position."""
        if isinstance(self.given, int):
            return (values,)
        by_position = dict(zip(self.given, values, strict=True))
        return tuple(by_position[position] for position in self.argnums)

    def in_user_order(self, values: Sequence[Any]) -> Any:
        """Return values by position in the order that a user gave, or the only one."""
        if isinstance(self.given, int):
            return values[0]
        by_position = dict(zip(self.argnums, values, strict=True))
        return tuple(by_position[position] for position in self.given)

    def of(self, where: int | str) -> str:
        """Return the role of an argument's arrays, if no spec says otherwise."""
        if where in self.argnums:
            return DIFFERENTIATED
        return STATIC if self._known_as(where) & set(self.static) else SPLIT

    def entry(self, where: int | str, entries: Entries) -> tuple[int | str, Any]:
        """Return the key of an argument among specs or rules, and its entry; None without one."""
        for key in self._known_as(where) & set(entries):
            return key, entries[key]
        return where, None

    def specs_of(self, where: int | str, argument: Any) -> list[PartitionSpec | None]:
        """Return the specs of the leaves of an argument, None for the default."""
        return of_leaves("in_specs", *self.entry(where, self.in_specs), argument)

    def rules_of(self, where: int | str, argument: Any) -> list[Split | None]:
        """Return the rules of the leaves of an argument, None for that of all arguments."""
        return of_leaves("split", *self.entry(where, self.rules), argument)

    def check(self, count: int, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for roles of arguments that a call does not have, or of two kinds."""
        given = {
            "argnums": self.argnums,
            "static_argnums or static_argnames": self.static,
            "in_specs": tuple(self.in_specs),
            "split": tuple(self.rules),
        }
        for argument, places in given.items():
            for where in places:
                if isinstance(where, int) and not 0 <= where < count:
                    raise ValueError(
                        f"{argument} names position {where}, but there are {count} arguments. "
                        f"Give positions from 0 to {count - 1}."
                    )
                if isinstance(where, str) and where not in (*kwargs, *self.parameters):
                    raise ValueError(
                        f"{argument} names {where!r}, but the arguments are "
                        f"{[*self.parameters, *sorted(set(kwargs) - set(self.parameters))]}. Give "
                        "their names."
                    )
        for argument, places in given.items():
            known = [self._known_as(where) for where in places]
            others = [{n} for n in self.argnums] if argument.startswith("static") else []
            for number, (where, names) in enumerate(zip(places, known, strict=True)):
                if any(names & other for other in known[:number] + others):
                    raise ValueError(
                        f"Argument {where!r} is given twice in argnums and static_ arguments, in "
                        "in_specs or in split. Give it once."
                    )

    def check_whole(self, where: int | str, kind: str, spec: Any, rule: Any) -> None:
        """Raise ValueError for a spec or a rule that splits an argument which is not split."""
        remedy = ""
        if spec is not None and axes_of(spec):
            given, value = f"in_specs[{self.entry(where, self.in_specs)[0]!r}]", f"{spec}"
            remedy = "Give None or P(). `specs` says how parameters are split over further axes."
        elif rule is not None:
            given, value = f"split[{self.entry(where, self.rules)[0]!r}]", f"{rule!r:.80}"
            remedy = "Give rules for arguments of the batch."
        if remedy:
            raise ValueError(
                f"{given} holds {value}, but the argument is {kind} and not split over the "
                f"workers. {remedy}"
            )

    def _known_as(self, where: int | str) -> set[int | str]:
        """Return the position and the name of an argument, as far as known."""
        if isinstance(where, int):
            return {where, *self.parameters[where : where + 1]}
        known = where in self.parameters
        return {where, self.parameters.index(where)} if known else {where}


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
    specs: tuple[PartitionSpec | None, ...]  # of every leaf; None for the default
    rules: tuple[Split | None, ...]  # of the rows of every leaf; None for neighboring ones
    static: tuple[Static, ...]  # leaves that are no arrays
    graphs: tuple[tuple[int | str, Any], ...]  # arguments that are modules, and their structures

    @property
    def splits(self) -> list[PartitionSpec]:
        """Specs of the leaves of the batch, of which `resolve_batch` leaves none out."""
        return self.of_batch(self.specs)

    def of_batch(self, values: Sequence[Any]) -> list[Any]:
        """Return those values of every leaf that are of leaves of the batch."""
        return [value for value, role in zip(values, self.roles, strict=True) if role == SPLIT]

    def rebuild(self, arrays: Arrays) -> tuple[list[Any], dict[str, Any]]:
        """Return arguments of a call, with parts in place of modules, from leaves by role."""
        return self._filled({**arrays, STATIC: [static.value for static in self.static]})

    def _filled(self, leaves: Arrays) -> tuple[list[Any], dict[str, Any]]:
        left = {role: iter(of_role) for role, of_role in leaves.items()}
        args, kwargs = jax.tree.unflatten(self.structure, [next(left[role]) for role in self.roles])
        return list(args), kwargs

    def differentiated(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return the trees that gradients are like, by position: None for what is static."""
        args, _ = self._filled({**arrays, STATIC: [None] * len(self.static)})
        return tuple(
            args[n].params if isinstance(args[n], ModuleParts) else args[n] for n in self.argnums
        )


def sort_by_role(
    args: Sequence[Any], kwargs: Mapping[str, Any], roles: Roles
) -> tuple[Signature, dict[str, list[Any]]]:
    """Sort the leaves of the arguments of a call by role.

    Floating and complex leaves of a differentiated argument are differentiated, the others are
    whole. Numbers and other scalars are whole, and what is neither an array nor a number is static.
    In equinox modules, numbers are static too: Python branches on them.

    Raises:
      ValueError: a static value that cannot be hashed; specs that do not fit an argument, or that
        split one that is not split.
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
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(parted)
    values: dict[int | str, Any] = dict(enumerate(parted[0]))
    values.update(parted[1])
    left = {where: iter(roles.specs_of(where, value)) for where, value in values.items()}
    rules_left = {where: iter(roles.rules_of(where, value)) for where, value in values.items()}
    numbers_static = {where for where, value in values.items() if modules.holds_equinox(value)}
    arrays: dict[str, list[Any]] = {DIFFERENTIATED: [], SPLIT: [], WHOLE: []}
    sorted_roles: list[str] = []
    specs: list[PartitionSpec | None] = []
    rules: list[Split | None] = []
    static: list[Static] = []
    names: list[str] = []
    for path, leaf in paths_and_leaves:
        where = path[1].idx if path[0].idx == 0 else path[1].key
        is_rest = path[2:3] == (jax.tree_util.GetAttrKey("rest"),)
        is_module = any(where == other for other, _ in graphs)
        spec, rule = next(left[where]), next(rules_left[where])
        if is_module or roles.of(where) != SPLIT:
            kind = "a module" if is_module else roles.of(where)
            roles.check_whole(where, kind, spec, rule)
        if where in numbers_static and isinstance(leaf, numbers.Number):
            role = STATIC
        else:
            role = _role_of_leaf(leaf, roles.of(where), is_whole=is_module and is_rest)
        if role == SPLIT and (is_module or not (spec is None or axes_of(spec))):
            role = WHOLE
        sorted_roles.append(role)
        specs.append(spec)
        rules.append(rule or roles.rule)
        names.append(f"argument {where!r}{jax.tree_util.keystr(path[2:])}")
        if role == STATIC:
            static.append(static_value(names[-1], leaf))
        else:
            arrays[role].append(leaf)
    signature = Signature(
        roles.argnums,
        structure,
        tuple(sorted_roles),
        tuple(names),
        tuple(specs),
        tuple(rules),
        tuple(static),
        tuple(graphs),
    )
    return signature, arrays


def by_position(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, by position as far as no argument is left out before them.

    Defaults stay with the function: they are constants of it, not arguments of the call.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or one that the call does not fit
        return tuple(args), dict(kwargs)
    return bound.args, bound.kwargs


def with_gaps_filled(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, all by position where the function has one for them.

    Arguments that are left out before others have their defaults.
    """
    named = set(kwargs) & set(_parameters(function))
    if not named:
        return tuple(args), dict(kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    names = list(bound.signature.parameters)
    last = max(map(names.index, named))
    for name in names[:last]:
        bound.arguments.setdefault(name, bound.signature.parameters[name].default)
    # In the order of the parameters, as `BoundArguments.args` needs them.
    bound.arguments = {name: bound.arguments[name] for name in names if name in bound.arguments}
    return bound.args, bound.kwargs


def unwrap_single(trees: Sequence[Any]) -> Any:
    """Return a single value as it is, else all: errors and policies name what a user gave."""
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
        return WHOLE if is_whole or not jnp.issubdtype(dtype, jnp.inexact) else DIFFERENTIATED
    return WHOLE if is_whole or np.ndim(leaf) == 0 else role
