"""Shards of leaves: what each device of an island sends, and what it needs of the others.

An island whose leaves lie on several devices sends one message for each, with the shards of which
the device holds the first copy. So no array has to be whole anywhere, and what is sent follows from
the shardings alone: it has the same bits whether the devices belong to one process or to several.
"""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from dynamiq_jax.islands.merging import Leaves, leaves_of

_NAME = re.compile(r"(.*)@((?:\d+:\d+(?:,\d+:\d+)*)?)", re.DOTALL)

Values = dict["Shard", NDArray[Any]]


class Shard(NamedTuple):
    """A rectangular part of a leaf."""

    path: str
    bounds: tuple[tuple[int, int], ...]  # first index of each dimension, and the one past the last

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def name(self) -> str:
        """Name in a message, such as "layers/0/kernel@0:512,256:512"."""
        return f"{self.path}@{','.join(f'{start}:{stop}' for start, stop in self.bounds)}"

    @staticmethod
    def whole(path: str, shape: Sequence[int]) -> "Shard":
        """Return a whole leaf."""
        return Shard(path, tuple((0, size) for size in shape))

    @staticmethod
    def named(name: str) -> "Shard":
        """Return the shard of a name.

        Raises:
          ValueError: the name of none.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r:.100} names no part of a leaf.")
        path, text = match.groups()
        pairs = [map(int, pair.split(":")) for pair in text.split(",") if pair]
        return Shard(path, tuple((start, stop) for start, stop in pairs))

    def inside(self, other: "Shard") -> tuple[slice, ...] | None:
        """Return where the elements of both are in this one; None if there are none."""
        if self.path != other.path or len(self.bounds) != len(other.bounds):
            return None
        found = []
        for (start, stop), (first, last) in zip(self.bounds, other.bounds, strict=True):
            low, high = max(start, first), min(stop, last)
            if low >= high:
                return None
            found.append(slice(low - start, high - start))
        return tuple(found)


def as_arrays(tree: Any) -> Any:
    """Return a tree with arrays of JAX in place of those of NumPy, and of numbers."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, Array) else jnp.asarray(leaf), tree)


def devices_of(tree: Any) -> list[jax.Device]:
    """Return the devices of all processes that hold a tree, in the order of their numbers."""
    found = {device for leaf in jax.tree.leaves(tree) for device in leaf.sharding.device_set}
    return sorted(found, key=lambda device: device.id)


def parts_of(tree: Any) -> dict[int, dict[Shard, Array | None]]:
    """Return what each device sends, by its number among those of the tree.

    Values are arrays of one device, or None of devices of other processes.
    """
    numbers = {device: number for number, device in enumerate(devices_of(tree))}
    parts: dict[int, dict[Shard, Array | None]] = {}
    for path, leaf in zip(leaves_of(tree), jax.tree.leaves(tree), strict=True):
        local = {shard.device: shard.data for shard in leaf.addressable_shards}
        seen = set[Shard]()
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            shard = _shard(path, index, leaf.shape)
            if shard not in seen:
                parts.setdefault(numbers[device], {})[shard] = local.get(device)
                seen.add(shard)
    return dict(sorted(parts.items()))


def needed(tree: Any) -> list[Shard]:
    """Return the shards of a tree that this process holds."""
    found = (
        _shard(path, shard.index, leaf.shape)
        for path, leaf in zip(leaves_of(tree), jax.tree.leaves(tree), strict=True)
        for shard in leaf.addressable_shards
    )
    return [*dict.fromkeys(found)]


def assembled(like: Any, values: Values) -> Any:
    """Return a tree of the shardings of another one, from the shards that `needed(like)` names."""

    def leaf_of(path: str, leaf: Array) -> Array:
        def read(index: tuple[slice, ...] | None) -> NDArray[Any]:
            shard = _shard(path, index or (), leaf.shape)
            return values[shard] if all(shard.shape) else np.zeros(shard.shape, leaf.dtype)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, map(leaf_of, leaves_of(like), leaves))


def take_in(
    totals: Values,
    sources: Iterable[tuple[Shard, NDArray[Any]]],
    wanted: Iterable[Shard],
    factor: float | None = None,
) -> None:
    """Add values of shards of any bounds, times a factor, to the totals of the wanted shards.

    A product is rounded, and so is a sum, on all hardware alike. Without a factor, values of any
    dtype are put into their places.
    """
    own = _by_path(wanted)
    for source, values in sources:
        for shard in own.get(source.path, ()):
            if (place := shard.inside(source)) is None:
                continue
            if shard not in totals:
                totals[shard] = np.zeros(shard.shape, values.dtype)
            total, part = totals[shard], values[source.inside(shard)]
            if factor is None:
                total[place] = part
            else:
                total[place] += part * values.dtype.type(factor)


def meet(some: Iterable[Shard], others: Iterable[Shard]) -> bool:
    """Return whether shards have elements in common."""
    found = _by_path(others)
    return any(s.inside(o) is not None for s in some for o in found.get(s.path, ()))


def check_cover(shards: Iterable[Shard], wanted: Iterable[Shard]) -> None:
    """Raise ValueError where some elements of shards are missing in others, or there twice."""
    found = _by_path(dict.fromkeys(shards))
    for shard in wanted:
        places = [shard.inside(other) for other in found.get(shard.path, ())]
        size = sum(math.prod(s.stop - s.start for s in p) for p in places if p is not None)
        if size != math.prod(shard.shape):
            raise ValueError(f"it has {size} of {math.prod(shard.shape)} elements of {shard.name}.")


def check_inside(shards: Iterable[Shard], leaves: Leaves) -> None:
    """Raise ValueError for shards that are no parts of leaves: those of larger ones reach out."""
    for shard in shards:
        shape, _ = leaves.get(shard.path, ((), ""))
        ends = [stop for _, stop in shard.bounds]
        is_known = shard.path in leaves and len(shape) == len(ends)
        if not is_known or any(map(operator.gt, ends, shape)):
            raise ValueError(f"it has {shard.name}, and this island {leaves!r:.200}.")


def check_leaves(
    found: Mapping[Shard, str], leaves: Leaves, wanted: Iterable[Shard] | None = None
) -> None:
    """Raise ValueError for shards, with their dtypes, that are not those of leaves.

    The wanted shards have to be among them; None for all leaves.
    """
    check_inside(found, leaves)
    for shard, dtype in found.items():
        if dtype != leaves[shard.path][1]:
            raise ValueError(f"it has {shard.name} of {dtype}, and this island {leaves!r:.200}.")
    whole = (Shard.whole(path, shape) for path, (shape, _) in leaves.items())
    check_cover(found, whole if wanted is None else wanted)


def _by_path(shards: Iterable[Shard]) -> dict[str, list[Shard]]:
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.path, []).append(shard)
    return found


def _shard(path: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> Shard:
    """Return the shard of an index of JAX."""
    return Shard(path, tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True)))
