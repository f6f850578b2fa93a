"""Arguments and results of a step, apart by arrays and constants.

Objects of flax.nnx, which a step changes in place, are opened: their arrays are inputs and outputs
of its program.
"""

import dataclasses
import enum
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from pallas_kernels._jax.compat import override

# Values that a program takes as inputs. Other leaves, such as flags and functions, are constants.
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (float, complex)


class _Kind(enum.Enum):
    """Leaf that is no constant."""

    ARRAY = enum.auto()
    OBJECT = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Constant:
    """Leaf that is a constant of a program. Without a hash, it is equal to itself alone."""

    value: Any

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(
            _has_hash(self.value) and self.value == other.value
        )

    @override
    def __hash__(self) -> int:
        return hash(self.value) if _has_hash(self.value) else id(self.value)


@dataclasses.dataclass(frozen=True)
class _Opened:
    """Objects of flax.nnx without their arrays."""

    graph: Any
    structure: Any  # of their state

    @classmethod
    def of(cls, objects: Sequence[Any]) -> "tuple[_Opened | None, list[Any]]":
        """Open objects, and return their arrays besides."""
        if not objects:
            return None, []
        graph, state = sys.modules["flax.nnx"].split(tuple(objects))
        arrays, structure = jax.tree.flatten(state)
        return cls(graph, structure), arrays


class Leaves(NamedTuple):
    """Leaves of a tree."""

    kinds: tuple[_Kind | _Constant, ...]
    structure: Any
    opened: _Opened | None
    arrays: tuple[Any, ...]  # those of objects last
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, tree: Any, *, is_jitted: bool = False) -> "Leaves":
        """Take a tree apart.

        Args:
          tree: arrays, objects and other values.
          is_jitted: whether it is of a function of `jax.jit`, for which objects of flax.nnx are
            trees, and numbers may be static.
        """
        leaves, structure = jax.tree.flatten(tree, is_leaf=None if is_jitted else _is_object)
        traced = _ARRAYS if is_jitted else (*_ARRAYS, *_NUMBERS)
        kinds = tuple(_kind_of(leaf, traced) for leaf in leaves)
        of_kind = list(zip(leaves, kinds, strict=True))
        objects = tuple(leaf for leaf, kind in of_kind if kind is _Kind.OBJECT)
        arrays = tuple(leaf for leaf, kind in of_kind if kind is _Kind.ARRAY)
        opened, inside = _Opened.of(objects)
        return cls(kinds, structure, opened, (*arrays, *inside), objects)

    @property
    def shardings(self) -> tuple[NamedSharding | None, ...]:
        """Shardings of the arrays, as far as they are known."""
        return tuple(map(_sharding_of, self.arrays))

    @property
    def types(self) -> Hashable:
        """Shapes and dtypes of the arrays."""
        described = [
            array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
            for array in self.arrays
        ]
        return tuple(
            (each.shape, each.dtype, getattr(each, "weak_type", False)) for each in described
        )

    def of_arrays(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the values, one for each leaf, of those leaves that are arrays."""
        pairs = zip(values, self.kinds, strict=True)
        return tuple(value for value, kind in pairs if kind is _Kind.ARRAY)

    def of_leaves(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return values of arrays, with None for all other leaves."""
        given = iter(values)
        return tuple(next(given) if kind is _Kind.ARRAY else None for kind in self.kinds)

    @property
    def kind(self) -> Hashable:
        """Everything but the arrays that a program depends on, in a form that can be compared."""
        opened = self.opened and (_Constant(self.opened.graph), self.opened.structure)
        return self.kinds, self.structure, opened

    def with_arrays(self, arrays: Sequence[Any]) -> "tuple[Any, tuple[Any, ...]]":
        """Return the tree with other arrays and new objects, and these objects."""
        given = iter(arrays)
        count = sum(kind is _Kind.ARRAY for kind in self.kinds)
        objects = ()
        if self.opened is not None:
            state = jax.tree.unflatten(self.opened.structure, arrays[count:])
            objects = sys.modules["flax.nnx"].merge(self.opened.graph, state)
        new = iter(objects)
        leaves = [
            kind.value
            if isinstance(kind, _Constant)
            else next(given if kind is _Kind.ARRAY else new)
            for kind in self.kinds
        ]
        return jax.tree.unflatten(self.structure, leaves), objects

    def update(self, objects: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Give objects the arrays of a step."""
        assert self.opened is not None
        state = jax.tree.unflatten(self.opened.structure, arrays)
        sys.modules["flax.nnx"].update(tuple(objects), state)

    def check_graph(self, objects: Sequence[Any]) -> list[Any]:
        """Return the arrays of objects that a step has changed.

        Raises:
          ValueError: the step has changed more than arrays.
        """
        after, arrays = _Opened.of(objects)
        if after != self.opened:
            raise ValueError(
                "The step changes the structure of a flax.nnx object that it is given, such as by "
                "a new attribute. Make all attributes before the first step: a compressed step "
                "updates arrays alone."
            )
        return arrays


def _kind_of(leaf: Any, traced: tuple[type, ...]) -> _Kind | _Constant:
    if isinstance(leaf, traced):
        return _Kind.ARRAY
    return _Kind.OBJECT if _is_object(leaf) else _Constant(leaf)


def _is_object(node: Any) -> bool:
    """Return whether a value is an object of flax.nnx, without importing it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, (nnx.Pytree, nnx.Object, nnx.Variable))


def _sharding_of(array: Any) -> NamedSharding | None:
    """Return the sharding of an array over a mesh; None if it is not known."""
    if isinstance(array, jax.core.Tracer):
        sharding = getattr(jax.typeof(array), "sharding", None)  # of explicit axes
        is_known = isinstance(sharding, NamedSharding) and sharding.mesh.explicit_axes
        return sharding if is_known else None
    sharding = getattr(array, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
