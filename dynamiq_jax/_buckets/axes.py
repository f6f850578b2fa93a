"""Axes of a collective: a slow one, which compressed parts cross, and fast ones inside it."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._buckets import scopes
from dynamiq_jax._core import Axis
from dynamiq_jax._inputs.shards import managed_axes
from pallas_kernels._jax import compat
from pallas_kernels.copies import pad

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Workers of one collective, on one slow axis and any number of fast ones.

    A sum over the fast axes is exact, and leaves a part on each worker. The sum of a part over the
    slow axis is compressed.
    """

    slow: Axis
    fast: tuple[Axis, ...] = ()  # slower ones first

    @staticmethod
    def of(sizes: Mapping[str, int]) -> "Axes":
        """Return axes by their names and sizes, the slow one first."""
        slow, *fast = itertools.starmap(Axis, sizes.items())
        return Axes(slow, tuple(fast))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all axes, slowest first."""
        return (self.slow.name, *(axis.name for axis in self.fast))

    @property
    def num_fast(self) -> int:
        """Workers that share one place on the slow axis: a bucket is cut into as many parts."""
        return math.prod(axis.size for axis in self.fast)

    @property
    def num_workers(self) -> int:
        """All workers."""
        return self.slow.size * self.num_fast

    @property
    def passes(self) -> float:
        """Times that each worker sends an array over the slow axis to sum it exactly.

        Beside fast axes, each worker sends its part. For an exact leaf, XLA has one collective over
        all axes, whose way through the network is not known: a good one sends as much.
        """
        return 2 * (self.slow.size - 1) / self.slow.size / self.num_fast

    def part_size(self, size: int, granule: int) -> int:
        """Return the coordinates of a worker's part of a bucket, a multiple of `granule`."""
        if not self.fast:
            return size
        return -(-size // (self.num_fast * granule)) * granule

    @scopes.scope(scopes.FAST)
    def scatter(self, flat: Array, part_size: int) -> Array:
        """Sum exactly over the fast axes and return the worker's part: float [part_size]."""
        if not self.fast:
            return flat
        part = pad(flat.astype(jnp.float32), self.num_fast * part_size)
        for axis in reversed(self.fast):
            part = axis.sum_scatter(part, tiled=True)
        return part

    @scopes.scope(scopes.FAST)
    def gather(self, part: Array, size: int) -> Array:
        """Join the parts of all workers of the fast axes: [size]."""
        for axis in self.fast:
            part = axis.gather(part, tiled=True)  # a TPU rearranges rows
        return part[:size]

    def fold_in(self, key: Array) -> Array:
        """Return a key for each part, so that rounding errors of different parts differ."""
        for axis in self.fast:
            key = jax.random.fold_in(key, axis.index)
        return key


def axis_names(axis_name: Any, argument: str = "axis_name") -> tuple[str, ...]:
    """Return the names of one axis or several as a tuple; errors name `argument`.

    Raises:
      ValueError: something else than a name, no name, or a name that occurs twice.
    """
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    are_names = all(isinstance(name, str) for name in names)
    if not names or not are_names or len(set(names)) < len(names):
        raise ValueError(
            f"{argument}={axis_name!r} does not name different axes. Give the name of an axis, "
            "such as 'data', or of several with the slowest link first, such as ('hosts', 'local')."
        )
    return names


def find_axes(axis_name: Any, *, single: bool = False) -> Axes:
    """Find one axis in scope, or several unless `single`; see `dynamiq_jax.psum`.

    Raises:
      ValueError: see `axis_names`; a name that is no axis in scope; several of which one is
        possible.
    """
    names = axis_names(axis_name)
    axes = Axes.of({name: _size_of(name, axis_name) for name in names})
    if single and axes.fast:
        raise ValueError(
            f"axis_name={axis_name!r} names {len(names)} axes, where only one is possible. Give "
            "the slow one, and use the collectives of jax.lax over the others."
        )
    return axes


def _size_of(name: str, axis_name: Any) -> int:
    """Return the size of one of the axes that a user gives, or raise ValueError."""
    try:
        size = lax.axis_size(name)
    except NameError:
        here = ", ".join(map(repr, compat.axes_in_scope()))
        there_are = f"There are {here}." if here else "There is none."
        raise ValueError(
            f"axis_name={axis_name!r}: {name!r} is not an axis here. {there_are} Call this "
            "inside jax.shard_map over a mesh with that axis, or inside "
            f"jax.vmap(..., axis_name={name!r}), also optimizer.init of a method that carries "
            "state. A step outside of both, with shardings alone, is compressed by dq.compress."
        ) from None
    if name in managed_axes(jax.sharding.get_abstract_mesh()):
        raise ValueError(
            f"axis_name={axis_name!r}: {name!r} is an axis of jax.vmap here, and one of the mesh "
            "that the compiler manages. It would sum exactly, and save nothing. Use jax.shard_map, "
            "or jnp.mean over the axis of the replicas, and give the step to dq.compress."
        )
    return size
