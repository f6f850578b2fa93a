"""Arguments and results of a step, apart by arrays and constants.

Objects of flax.nnx, which a step changes in place, are opened: their arrays are inputs and outputs
of its program.
"""

import collections
import dataclasses
import functools
import sys
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Values that a program takes as inputs. Other leaves, such as flags and functions, are constants.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)
_NUMBERS = (float, complex, np.generic)


@dataclasses.dataclass(frozen=True)
class _Constant:
    """Leaf that is a constant of a program. Without a hash, it is equal to itself alone."""

    value: Any = dataclasses.field(compare=False)
    key: Hashable

    @classmethod
    def of(cls, value: Any) -> "_Constant":
        """Return a constant with what it is compared by."""
        try:
            hash(value)
        except TypeError:
            return cls(value, id(value))
        return cls(value, (type(value), value))


_Kind = Literal["array", "object"] | _Constant
_Opened = tuple[Any, Any]  # objects of flax.nnx without their arrays: the graph, and their places


def _opened(objects: Sequence[Any]) -> tuple[_Opened | None, list[Any]]:
    """Open objects of flax.nnx, and return their arrays besides."""
    if not objects:
        return None, []
    graph, state = sys.modules["flax.nnx"].split(tuple(objects))
    arrays, structure = jax.tree.flatten(state)
    return (graph, structure), arrays


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["kinds", "structure", "opened"],
    drop_fields=["objects"],
)
@dataclasses.dataclass(frozen=True)
class Leaves:
    """Leaves of a tree. Of this tree, the arrays are the leaves."""

    arrays: tuple[Any, ...]  # those of objects last
    kinds: tuple[_Kind, ...]
    structure: Any
    opened: _Opened | None
    objects: tuple[Any, ...] = ()

    @classmethod
    def of(cls, tree: Any, *, is_jitted: bool = False) -> "Leaves":
        """Take a tree apart.

        Functions of `jax.jit` take objects of flax.nnx as trees, and numbers that may be static.
        """
        leaves, structure = jax.tree.flatten(tree, is_leaf=None if is_jitted else _is_object)
        traced = _ARRAYS if is_jitted else (*_ARRAYS, *_NUMBERS)
        kinds = tuple(_kind_of(leaf, traced) for leaf in leaves)
        objects = tuple(leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "object")
        arrays = tuple(leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == "array")
        opened, inside = _opened(objects)
        return cls((*arrays, *inside), kinds, structure, opened, objects)

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
        return tuple(value for value, kind in pairs if kind == "array")

    def of_leaves(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return values of arrays, with None for all other leaves."""
        given = iter(values)
        return tuple(next(given) if kind == "array" else None for kind in self.kinds)

    @property
    def kind(self) -> Hashable:
        """Everything but the arrays that a program depends on, in a form that can be compared."""
        graph, places = self.opened or (None, None)
        return self.kinds, self.structure, _Constant.of(graph), places

    def with_arrays(self, arrays: Sequence[Any]) -> "Leaves":
        """Return the leaves with other arrays, and without objects."""
        return dataclasses.replace(self, arrays=tuple(arrays), objects=())

    def joined(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the tree with new objects, and these objects."""
        count, objects = self.kinds.count("array"), ()
        if self.opened is not None:
            graph, places = self.opened
            state = jax.tree.unflatten(places, self.arrays[count:])
            objects = sys.modules["flax.nnx"].merge(graph, state)
        given = {"array": iter(self.arrays), "object": iter(objects)}
        leaves = [
            kind.value if isinstance(kind, _Constant) else next(given[kind]) for kind in self.kinds
        ]
        return jax.tree.unflatten(self.structure, leaves), objects

    def update(self, arrays: Sequence[Any]) -> None:
        """Give the objects the arrays of a step."""
        if self.opened is not None:
            state = jax.tree.unflatten(self.opened[1], arrays)
            sys.modules["flax.nnx"].update(self.objects, state)

    def check_graph(self, objects: Sequence[Any]) -> list[Any]:
        """Return the arrays of objects that a step has changed.

        Raises:
          ValueError: the step has changed more than arrays.
        """
        after, arrays = _opened(objects)
        if after != self.opened:
            raise ValueError(
                "The step changes the structure of a flax.nnx object that it is given, such as by "
                "a new attribute. Make all attributes before the first step: a compressed step "
                "updates arrays alone."
            )
        return arrays


def _kind_of(leaf: Any, traced: tuple[type, ...]) -> _Kind:
    if isinstance(leaf, traced):
        return "array"
    return "object" if _is_object(leaf) else _Constant.of(leaf)


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


def specs_alike(
    results: Leaves, arguments: Leaves, specs: Sequence[PartitionSpec | None]
) -> dict[int, PartitionSpec]:
    """Return the specs of results from arguments of their shapes, by the numbers of the results,
    such as those of gradients from parameters.

    The argument counts whose path has the longest end in common with that of the result, such as
    `['layers']['kernel']`. Several of different specs tell nothing. A wrong one costs bytes, and
    never a number.
    """
    alike: dict[Any, set[PartitionSpec]] = collections.defaultdict(set)  # by shape and end of path
    for path, array, spec in zip(_paths(arguments), arguments.arrays, specs, strict=False):
        if spec is not None:
            for start in range(len(path) + 1):
                alike[array.shape, path[start:]].add(spec)
    found = {}
    for number, (path, array) in enumerate(zip(_paths(results), results.arrays, strict=False)):
        # The longest end comes first.
        ends = ((array.shape, path[start:]) for start in range(len(path) + 1))
        best = next((alike[end] for end in ends if end in alike), set())
        if len(best) == 1:
            (found[number],) = best
    return found


def _paths(leaves: Leaves) -> list[tuple[Any, ...]]:
    """Return the paths of the arrays that are leaves."""
    tree = jax.tree.unflatten(leaves.structure, range(len(leaves.kinds)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return list(leaves.of_arrays(paths))
