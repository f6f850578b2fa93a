"""Shards: the parts of leaves that lie on the devices of further axes of the mesh.

A collective makes these axes manual around itself, so that every device compresses and sends its
own shard. Otherwise the compiler would gather whole leaves on every device, to flatten them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._core import MistakeError
from pallas_kernels._jax import compat

P = PartitionSpec


@dataclasses.dataclass(frozen=True)
class Shards:
    """Parts of leaves that are split over axes that the compiler manages, or explicit axes."""

    sizes: Mapping[str, int]  # devices of each axis that has several, in the order of the mesh
    specs: tuple[PartitionSpec, ...]  # of every leaf, over these axes alone

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(self.sizes)

    def axes_of(self, index: int) -> tuple[str, ...]:
        """Return the axes over which a leaf is split, in the order of the mesh."""
        named = {name for dimension in self.specs[index] for name in names_of(dimension)}
        return tuple(axis for axis in self.axes if axis in named)

    def split_of(self, index: int) -> list[list[int]]:
        """Return the split of a leaf over devices, without names of axes.

        The devices are numbered along the axes of the leaf, in the order of the mesh. Neighboring
        axes that split a dimension in this order count as one.

        Returns:
          For each axis, its dimension, its place among the axes of this dimension, and its devices.
        """
        places = {
            name: (dimension, place)
            for dimension, names in enumerate(self.specs[index])
            for place, name in enumerate(names_of(names))
        }
        parts: list[list[int]] = []
        for name in self.axes_of(index):
            dimension, place = places[name]
            if parts and parts[-1][0] == dimension and parts[-1][2] + 1 == place:
                parts[-1][2:] = [place, parts[-1][3] * self.sizes[name]]
            else:
                parts.append([dimension, place, place, self.sizes[name]])
        return [[dimension, first, count] for dimension, first, _, count in parts]

    def local(self, index: int, leaf: Any) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of a device's shard of a leaf."""
        parts = [_count(dimension, self.sizes) for dimension in self.specs[index]]
        parts += [1] * (len(leaf.shape) - len(parts))
        shape = tuple(size // count for size, count in zip(leaf.shape, parts, strict=True))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    def map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """Make the axes manual inside a function of arrays. Without axes, return the function."""
        if not self.sizes:
            return function
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return jax.shard_map(
            function,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.sizes),
            check_vma=all(map(compat.tracks_varying, manual)),  # as around it
        )

    def same(self, value: Any) -> Any:
        """Mark a value inside `map`, or None, as the same on all devices, for a spec P().

        The value may differ. Each device goes on with its own value.
        """
        for axis in self.sizes:
            value = compat.same_over(value, axis)
        return value


def names_of(dimension: Any) -> tuple[str, ...]:
    """Return the axes that split one dimension of a spec."""
    if dimension is None:
        return ()
    return (dimension,) if isinstance(dimension, str) else tuple(dimension)


def _count(dimension: Any, sizes: Mapping[str, int]) -> int:
    """Return into how many parts one dimension of a spec is split."""
    return math.prod(sizes[axis] for axis in names_of(dimension))


def managed_axes(mesh: Any) -> dict[str, int]:
    """Return the sizes of the axes of a mesh that are not manual and have several devices."""
    return {
        name: size for name, size in mesh.shape.items() if size > 1 and name not in mesh.manual_axes
    }


def find_shards(named: Sequence[tuple[str, Any]], tree: Any, specs: Any) -> Shards:
    """Find the split of the leaves of a tree, by name, over the axes that are not manual here.

    Without specs of the user, shardings are those of the types.

    Raises:
      ValueError: no specs beside an axis that the compiler manages; specs that do not fit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    managed = managed_axes(mesh)
    given = None if specs is None else leaf_specs(tree, specs)
    if not managed:
        return Shards({}, (P(),) * len(named))
    if given is None:
        if automatic := {name: managed[name] for name in mesh.auto_axes if name in managed}:
            raise unknown_specs(automatic)
        given = [jax.typeof(leaf).sharding.spec for _, leaf in named]
    return split_over(named, given, mesh, managed)


def unknown_specs(automatic: Mapping[str, int]) -> MistakeError:
    """Return the error of leaves that axes which the compiler manages may split in any way."""
    name, size = next(iter(automatic.items()))
    return MistakeError(
        "whole gradient",
        f"specs=None, but the compiler manages axis {name!r} of {size} devices here. Without specs "
        "every one of them would send all of every leaf. Give specs, as in "
        "method=dq.Compression(specs=specs): a tree of PartitionSpecs or NamedShardings like the "
        "tree (or a prefix of it), such as those of the parameters, or specs=P() if each device "
        "holds whole leaves.",
    )


def check_rank(argument: str, what: str, spec: PartitionSpec, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a spec with more dimensions than the array that it is for."""
    if len(spec) > len(shape):
        raise ValueError(
            f"{argument} gives {spec} for {what} of shape {shape}, which has {len(shape)} "
            "dimensions. Give a spec of at most as many."
        )


def split_over(
    named: Sequence[tuple[str, Any]],
    specs: Sequence[PartitionSpec],
    mesh: Any,
    managed: Mapping[str, int],
) -> Shards:
    """Reduce specs to some axes of a mesh, and check that they split leaves by name."""
    reduced = tuple(over(spec, managed) for spec in specs)
    for (name, leaf), spec, kept in zip(named, specs, reduced, strict=True):
        for axis in (axis for dimension in spec for axis in names_of(dimension)):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"specs gives {spec} for tree{name}, but the mesh has no axis {axis!r}. Its "
                    f"axes are {mesh.axis_names}."
                )
        check_rank("specs", f"tree{name}", kept, leaf.shape)
        for number, (size, dimension) in enumerate(zip(leaf.shape, kept, strict=False)):
            if size % (count := _count(dimension, managed)):
                raise ValueError(
                    f"specs gives {kept} for tree{name} of shape {leaf.shape}, whose dimension "
                    f"{number} does not split into {count} shards. Split another dimension, or "
                    "give P()."
                )
    return Shards(managed, reduced)


def leaf_specs(tree: Any, specs: Any, argument: str = "specs") -> list[PartitionSpec]:
    """Return the spec of every leaf of a tree, in flattened order.

    A user gives PartitionSpecs or NamedShardings in a tree like that of the leaves, or a prefix of
    it, with None for leaves that are not split; or a function from the tree to specs. `argument` is
    the name of theirs, for errors.

    Raises:
      ValueError: specs do not fit the tree.
      TypeError: a spec is something else.
    """
    # A module of specs, which is a tree, may be callable too.
    if callable(specs) and jax.tree_util.all_leaves([specs]):
        specs = specs(tree)

    def is_none(spec: Any) -> bool:
        return spec is None

    try:
        # A list for each spec: None in specs is a leaf, and None in the tree is not.
        given = jax.tree.map(
            lambda spec, part: [spec] * len(jax.tree.leaves(part)), specs, tree, is_leaf=is_none
        )
    except ValueError as error:
        raise ValueError(
            f"{argument}={specs!r:.200} does not fit the tree: {error}. Give a tree of "
            "PartitionSpecs with the structure of the tree, or a prefix of it."
        ) from None
    of_leaves = []
    for spec in jax.tree.leaves(given, is_leaf=is_none):
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if not isinstance(spec, PartitionSpec | None) or P.UNCONSTRAINED in (spec or ()):
            raise TypeError(
                f"{argument} holds {spec!r:.80}. Give PartitionSpecs or NamedShardings, such as "
                "jax.tree.map(lambda leaf: leaf.sharding, params)."
            )
        of_leaves.append(spec or P())
    return of_leaves


def over(spec: PartitionSpec, axes: Any) -> PartitionSpec:
    """Return a spec with some of its axes alone."""
    return P(*(tuple(name for name in names_of(each) if name in axes) for each in spec))
