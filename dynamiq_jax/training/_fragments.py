"""Fragments: parts of a tree of parameters that are synchronized in turns."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._plan.state_names import state_name

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Consecutive indices along one dimension of a leaf."""

    dimension: int
    start: int
    size: int

    def of(self, leaf: Array) -> Array:
        """Return the slice of a leaf."""
        return lax.slice_in_dim(leaf, self.start, self.start + self.size, axis=self.dimension)

    def put(self, leaf: Array, part: Array) -> Array:
        """Return a leaf with this slice replaced."""
        return lax.dynamic_update_slice_in_dim(leaf, part, self.start, self.dimension)


@dataclasses.dataclass(frozen=True)
class Fragments:
    """Fragments of a tree: a function of shapes and dtypes.

    A fragment is a tree like the whole one, with slices of leaves that are cut, and None in place
    of leaves that other fragments have.
    """

    # Leaf index to its slice, or to None for the whole leaf, by fragment.
    members: tuple[dict[int, Slice | None], ...]
    names: tuple[str, ...]  # of each fragment: what its states belong to

    @staticmethod
    def of(tree: Any, specs: Sequence[PartitionSpec], count: int) -> "Fragments":
        """Split a tree into fragments of about the same number of bytes.

        A leaf larger than its share of a fragment, such as layers that are stacked for a scan, is
        cut along a dimension that is not sharded. The largest piece goes first, each into the
        fragment that has the fewest bytes. Equal layers go to one fragment after the other, in
        turns.

        Args:
          tree: pytree of arrays, or of anything with `shape` and `dtype`.

        Raises:
          ValueError: fewer pieces than fragments.
        """
        leaves = jax.tree.leaves(tree)
        sizes = [math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize for leaf in leaves]
        share = sum(sizes) / count
        pieces: list[tuple[float, int, Slice | None]] = []  # bytes, leaf, slice
        for index, (leaf, size, spec) in enumerate(zip(leaves, sizes, specs, strict=True)):
            wanted = math.ceil(size / share) if share else 1
            for piece in _cut(leaf.shape, spec, min(wanted, count)):
                extent = piece.size / leaf.shape[piece.dimension] if piece else 1
                pieces.append((size * extent, index, piece))
        if not leaves:
            raise ValueError("params has no leaves. Give those that are trained.")
        if len(pieces) < count:
            raise ValueError(
                f"fragments={count} is more than the {len(pieces)} pieces that {len(leaves)} "
                "leaves can be cut into. Give fewer."
            )
        filled = [0.0] * count
        members: list[dict[int, Slice | None]] = [{} for _ in range(count)]
        for length, index, piece in sorted(pieces, key=lambda piece: -piece[0]):
            free = (number for number in range(count) if index not in members[number])
            least = min(free, key=lambda number: filled[number])
            filled[least] += max(length, 1)  # a leaf without elements counts too
            members[least][index] = piece
        names = (_name(number, each, tree) for number, each in enumerate(members))
        return Fragments(tuple(members), tuple(names))

    def take(self, tree: Tree, number: int) -> Tree:
        """Return a fragment of a tree."""
        leaves, structure = jax.tree.flatten(tree)
        kept: list[Any] = [None] * len(leaves)
        for index, piece in self.members[number].items():
            kept[index] = leaves[index] if piece is None else piece.of(leaves[index])
        return jax.tree.unflatten(structure, kept)

    def split(self, tree: Tree) -> dict[str, Tree]:
        """Return all fragments of a tree, by name."""
        return {name: self.take(tree, number) for number, name in enumerate(self.names)}

    def put(self, tree: Tree, number: int, fragment: Tree) -> Tree:
        """Return a tree with one of its fragments replaced."""
        leaves, structure = jax.tree.flatten(tree)
        members = sorted(self.members[number].items())
        for (index, piece), part in zip(members, jax.tree.leaves(fragment), strict=True):
            leaves[index] = part if piece is None else piece.put(leaves[index], part)
        return jax.tree.unflatten(structure, leaves)


def _cut(shape: tuple[int, ...], spec: PartitionSpec, wanted: int) -> list[Slice | None]:
    """Cut a leaf into `wanted` slices of about one size, or fewer if its dimensions are short."""
    split = [bool(names_of(dimension)) for dimension in spec]
    split += [False] * (len(shape) - len(split))
    extents = {number: size for number, size in enumerate(shape) if not split[number]}
    if wanted < 2 or not extents:
        return [None]
    enough = (number for number, size in extents.items() if size >= wanted)
    dimension = next(enough, max(extents, key=lambda number: extents[number]))
    bounds = np.linspace(0, extents[dimension], min(wanted, extents[dimension]) + 1).astype(int)
    if len(bounds) < 3:
        return [None]
    pairs = itertools.pairwise(bounds.tolist())
    return [Slice(dimension, start, stop - start) for start, stop in pairs]


def _name(number: int, members: dict[int, Slice | None], tree: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    pieces = []
    for index, piece in sorted(members.items()):
        path, leaf = leaves[index]
        place = dataclasses.astuple(piece) if piece else None
        pieces.append([jax.tree_util.keystr(path), np.shape(leaf), place])
    return state_name(f"fragment {number}", [path for path, *_ in pieces], pieces)
