"""Roles of arguments of a loss function: differentiated, split over workers, whole, or static."""

import dataclasses
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, Sharding

from dynamiq_jax._worker_loss.in_specs import Entries, axes_of, entries_of, of_leaves, rules_of
from dynamiq_jax._worker_loss.rows import Split

DIFFERENTIATED, SPLIT, WHOLE, STATIC = "differentiated", "split", "whole", "static"
Arrays = Mapping[str, list[Any]]  # role to the leaves that have it


class ArgumentLeaf(NamedTuple):
    """Leaf of an argument, and its role."""

    name: str  # for errors
    role: str
    spec: PartitionSpec | None  # None for the default
    rule: Split | None  # of its rows; None for neighboring ones
    value: Any


@dataclasses.dataclass(frozen=True)
class Roles:
    """Roles of arguments, as a user gives them."""

    given: int | tuple[int, ...]  # position or positions that are differentiated
    in_specs: Entries  # split of further arguments, by position or name
    rule: Split | None  # of the rows of all arrays that are split
    rules: Entries  # of the rows of some arguments, by position or name
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

    def in_argnums_order(self, specs: Any) -> tuple[Any, ...]:
        """Return the specs that a user gave for the differentiated arguments by position.

        Raises:
          ValueError: there are several positions, and neither one spec nor one entry for each.
        """
        if isinstance(self.given, int):
            return (specs,)
        if isinstance(specs, PartitionSpec | Sharding):
            return (specs,) * len(self.given)
        if not isinstance(specs, tuple | list) or len(specs) != len(self.given):
            raise ValueError(
                f"specs={specs!r:.200} has no entry for each of argnums={self.given}. Give a tuple "
                f"of {len(self.given)}, or one spec for all."
            )
        by_position = dict(zip(self.given, specs, strict=True))
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
        """Return the key of an argument among specs or rules, and its entry or None."""
        for key in self._known_as(where) & set(entries):
            return key, entries[key]
        return where, None

    def specs_of(self, where: int | str, argument: Any) -> list[PartitionSpec | None]:
        """Return the specs of the leaves of an argument, None for the default."""
        return of_leaves("in_specs", *self.entry(where, self.in_specs), argument)

    def rules_of(self, where: int | str, argument: Any) -> list[Split | None]:
        """Return the rules of the leaves of an argument, None for the rule of all arguments."""
        return of_leaves("split", *self.entry(where, self.rules), argument)

    def check(self, count: int, kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError for a role of an argument that a call lacks, or for two roles of one."""
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
        """Raise ValueError for a spec or a rule that splits an argument of another role."""
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


def by_position(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, by position up to the first that the call leaves out.

    Defaults are constants of the function, and no arguments of the call.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # no signature, or one that the call does not fit
        return tuple(args), dict(kwargs)
    return bound.args, bound.kwargs


def with_gaps_filled(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, by position for all parameters that have one.

    Arguments that a call leaves out, before an argument that it gives, have their defaults.
    """
    named = set(kwargs) & set(_parameters(function))
    if not named:
        return tuple(args), dict(kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs)
    names = list(bound.signature.parameters)
    last = max(map(names.index, named))
    for name in names[:last]:
        bound.arguments.setdefault(name, bound.signature.parameters[name].default)
    # `BoundArguments.args` needs the order of the parameters.
    bound.arguments = {name: bound.arguments[name] for name in names if name in bound.arguments}
    return bound.args, bound.kwargs


def unwrap_single(trees: Sequence[Any]) -> Any:
    """Return a single tree as it is, and several as a tuple, as the user gave them."""
    return trees[0] if len(trees) == 1 else tuple(trees)


def role_of_leaf(leaf: Any, role: str, *, is_whole: bool) -> str:
    """Return the role of a leaf of an argument.

    Args:
      leaf: any value.
      role: role of the arrays of the argument.
      is_whole: True for a leaf that no role of the argument differentiates or splits.
    """
    is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")  # a configuration may have a dtype
    if role == STATIC or not (is_array or isinstance(leaf, numbers.Number)):
        return STATIC
    if role == DIFFERENTIATED:
        dtype = jnp.result_type(leaf)
        return WHOLE if is_whole or not jnp.issubdtype(dtype, jnp.inexact) else DIFFERENTIATED
    return WHOLE if is_whole or np.ndim(leaf) == 0 else role


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name, in their order, as far as known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins and C functions
        return {}


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the positional arguments of a function, as far as known."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(p.name for p in parameters_of(function).values() if p.kind in kinds)


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, int | str) else tuple(given)
