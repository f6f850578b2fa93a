"""Specs and rules of a user, by which the arrays of a loss function are split over the workers.

Specs name the axis that is split. Rules assign the rows of this axis to workers.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import names_of, spread
from dynamiq_jax._worker_loss.rows import Split, rule_of

P = PartitionSpec
Entries = Mapping[int | str, Any]  # position or name of an argument to its tree of specs or rules


def entries_of(in_specs: Any) -> Entries:
    """Return specs that a user gives, by position or name of the argument.

    Raises:
      TypeError: `in_specs` is neither a tuple nor a dict, or holds something that is no spec.
    """
    if in_specs is None:
        return {}
    if isinstance(in_specs, PartitionSpec) or not isinstance(in_specs, tuple | Mapping):
        raise TypeError(
            f"in_specs={in_specs!r:.80} is neither a tuple nor a dict. Give a tuple with an entry "
            'for each positional argument, such as in_specs=(P(), P("data")), or a dict from '
            "names of arguments to entries."
        )
    entries = dict(enumerate(in_specs)) if isinstance(in_specs, tuple) else dict(in_specs)
    for where, entry in entries.items():
        if not isinstance(where, int | str):
            raise TypeError(
                f"in_specs has the key {where!r:.80}. Give names or positions of arguments."
            )
        for spec in jax.tree.leaves(entry):
            if not isinstance(spec, PartitionSpec) or P.UNCONSTRAINED in spec:
                raise TypeError(
                    f"in_specs[{where!r}] holds {spec!r:.80}. Give PartitionSpecs, or None for the "
                    "default."
                )
    return entries


def rules_of(split: Any) -> tuple[Split | None, Entries]:
    """Return the rule for all arrays, and the rules of arguments by position or name.

    Raises:
      TypeError: `split` is neither a rule nor a dict of rules.
      ValueError: no such rule, or a rule that cannot be hashed.
    """
    if isinstance(split, Mapping):
        return None, {where: jax.tree.map(rule_of, entry) for where, entry in split.items()}
    return (None if split is None else rule_of(split)), {}


def check_axes(entries: Entries, names: tuple[str, ...]) -> None:
    """Raise ValueError for a spec that names an axis twice, or an axis without workers."""
    for where, entry in entries.items():
        for spec in jax.tree.leaves(entry):
            used = axes_of(spec)
            for axis in used:
                if axis not in names:
                    raise ValueError(
                        f"in_specs[{where!r}] holds {spec}, but {axis!r} is not an axis of the "
                        f"workers. Give axes of {names}. Other axes of the mesh are left to the "
                        "compiler."
                    )
                if used.count(axis) > 1:
                    raise ValueError(
                        f"in_specs[{where!r}] holds {spec}, which names axis {axis!r} twice. Split "
                        "one dimension over it."
                    )


def of_leaves(given: str, key: int | str, entry: Any, argument: Any) -> list[Any]:
    """Return the spec or rule of every leaf of an argument, in flattened order.

    Args:
      given: `in_specs` or `split`, for errors.
      key: key of the entry, for errors.
      entry: a tree like the argument, or a prefix, of specs or rules, or None for the default.
      argument: a pytree.

    Raises:
      ValueError: the entry does not fit the argument.
    """

    try:
        return spread(entry, argument)
    except ValueError as error:
        raise ValueError(
            f"{given}[{key!r}]={entry!r:.200} does not fit the argument: {error}. Give one value "
            "for all of it, or a tree of them with the structure of the argument."
        ) from None


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the axes that a spec names, in the order of its dimensions."""
    return tuple(axis for dimension in spec for axis in names_of(dimension))
