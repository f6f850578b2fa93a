"""Values that are constants of the trace of a step: arguments that are no arrays, and attributes of
its objects.
"""

import dataclasses
import functools
import types
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_MANY = 8  # programs for arguments of one kind; one more is a warning


class Held(NamedTuple):
    """Arguments and attributes of objects, by their paths."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]  # arrays and values without a hash are held, and compared by identity

    @classmethod
    def by(cls, objects: Sequence[Any]) -> "Held":
        """Find the attributes of objects.

        Containers, settings in a dataclass or a namespace, and arguments of a partial function are
        opened. Other objects are compared as they compare themselves.
        """
        found = [pair for each in objects for pair in _attributes(each, "", set())]
        return cls(tuple(path for path, _ in found), tuple(value for _, value in found))

    def beside(self, other: "Held") -> "Held":
        """Return the values of both."""
        return Held(self.paths + other.paths, self.values + other.values)

    @property
    def kind(self) -> Hashable:
        """Everything about the values that a trace depends on."""
        return self.paths, tuple(map(_comparable, self.values))

    @property
    def has_tracers(self) -> bool:
        """True if one is a value of a trace."""
        return any(isinstance(value, jax.core.Tracer) for value in self.values)

    def differing(self, other: "Held") -> list[str]:
        """Return the paths of values that differ from those of another time."""
        before = dict(zip(other.paths, map(_comparable, other.values), strict=True))
        missing = object()
        return [
            path
            for path, value in zip(self.paths, map(_comparable, self.values), strict=True)
            if before.get(path, missing) != value
        ]


class Programs:
    """Compiled steps for arguments of one kind, by the values that are constants of each."""

    def __init__(self) -> None:
        self._by_kind: dict[Hashable, tuple[Any, Held]] = {}
        self._is_warned = False

    def get(self, held: Held) -> Any:
        """Return the step that was compiled for values; None if there is none."""
        return self._by_kind.get(held.kind, (None, None))[0]

    def add(self, held: Held, program: Any) -> None:
        """Store a compiled step, in place of the oldest one if there are many.

        The values are stored too: so their ids stay theirs.
        """
        if not self._is_warned and len(self._by_kind) == _MANY:
            _, last = list(self._by_kind.values())[-1]
            names = ", ".join(map(repr, held.differing(last)))
            warnings.warn(
                f"The step is compressed and compiled again, after {_MANY} times for arguments of "
                f"one kind: values have changed that are constants of the program, {names}. Give "
                "numbers that change as arguments that are arrays, such as jnp.float32(rate), and "
                "keep other attributes that change in another object.",
                stacklevel=5,
            )
            self._is_warned = True
        if len(self._by_kind) == _MANY:
            del self._by_kind[next(iter(self._by_kind))]
        self._by_kind[held.kind] = program, held


def check_unchanged(objects: Sequence[Any]) -> None:
    """Check that a trace has left nothing in objects.

    Raises:
      TypeError: the step assigns an attribute, which would happen only while it is traced.
    """
    if Held.by(objects).has_tracers:
        raise TypeError(
            "The step assigns arrays to attributes of an object, such as self.state, which would "
            "happen only while it is traced. Return them, or compress the function inside that "
            "takes and returns them."
        )


def _attributes(each: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the values that an object holds, with their paths."""
    if isinstance(each, functools.partial):
        held: Any = {"func": each.func, "args": each.args, "keywords": each.keywords}
    else:
        held = {} if _is_code(each) else dict(getattr(each, "__dict__", {}))
    if id(each) in seen:
        return
    seen.add(id(each))
    for where, leaf in _leaves(held, path):
        if _is_settings(leaf):
            yield where, type(leaf)
            yield from _attributes(leaf, f"{where}.", seen)
        else:
            yield where, leaf


def _leaves(held: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of containers, with their paths."""
    for keys, leaf in jax.tree_util.tree_leaves_with_path(held, is_leaf=_has_mixed_keys):
        where = (path + jax.tree_util.keystr(keys, simple=True, separator=".")).removesuffix(".")
        if not _has_mixed_keys(leaf):
            yield where, leaf
            continue
        for key, value in leaf.items():
            yield from _leaves(value, f"{where}[{key!r}].")


def _has_mixed_keys(node: Any) -> bool:
    """Return whether a dictionary has keys that JAX cannot sort."""
    if not isinstance(node, dict):
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False


def _is_code(each: Any) -> bool:
    return isinstance(each, types.FunctionType | types.BuiltinFunctionType | types.ModuleType)


def _is_settings(leaf: Any) -> bool:
    """Return whether an object without a hash of its values is opened."""
    if isinstance(leaf, (type, *ARRAYS)):
        return False
    is_plain = isinstance(leaf, functools.partial | types.SimpleNamespace)
    has_hash = type(leaf).__hash__ not in (None, object.__hash__)
    return is_plain or (dataclasses.is_dataclass(leaf) and not has_hash)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, ARRAYS):
        return id(value)
    if isinstance(value, set):
        value = frozenset(value)
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value
