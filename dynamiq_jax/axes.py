"""The axes that a collective reduces over: a slow one, and fast ones inside it."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax import checks, compat
from dynamiq_jax.codec.packing import SUPER_GROUP_SIZE

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Axes:
    """Workers of one collective. Over the fast axes numbers travel exactly, a part to each worker;
    over the slow one the parts travel compressed.
    """

    slow: str
    num_slow: int
    fast: tuple[tuple[str, int], ...] = ()  # (name, size), slower ones first

    @property
    def names(self) -> tuple[str, ...]:
        """All axes, slowest first."""
        return (self.slow, *(name for name, _ in self.fast))

    @property
    def num_fast(self) -> int:
        """Workers that share one place on the slow axis: as many parts is a bucket cut into."""
        return math.prod(size for _, size in self.fast)

    @property
    def num_workers(self) -> int:
        """All workers."""
        return self.num_slow * self.num_fast

    def part_size(self, size: int) -> int:
        """Coordinates of a worker's part of a bucket of `size` coordinates: whole super-groups, so
        that those of a part are those of the bucket.
        """
        if not self.fast:
            return size
        return -(-size // (self.num_fast * SUPER_GROUP_SIZE)) * SUPER_GROUP_SIZE

    def scatter(self, flat: Array) -> Array:
        """The worker's part of the exact sum over the fast axes: float [part_size]."""
        if not self.fast:
            return flat
        padding = self.num_fast * self.part_size(flat.size) - flat.size
        part = jnp.pad(flat.astype(jnp.float32), (0, padding))
        for name, _ in reversed(self.fast):
            part = lax.psum_scatter(part, name, tiled=True)
        return part

    def gather(self, part: Array, size: int) -> Array:
        """Inverse of `scatter`: the parts of all workers of the fast axes, [size]."""
        for name, _ in self.fast:
            part = compat.all_gather(part, name).reshape(-1)
        return part[:size]

    def fold_in(self, key: Array) -> Array:
        """A key of its own for each part: rounding errors of different parts do not match."""
        for name, _ in self.fast:
            key = jax.random.fold_in(key, lax.axis_index(name))
        return key


def axis_names(axis_name: Any) -> tuple[Any, ...]:
    """One axis or several, as several."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def find_axes(axis_name: Any) -> Axes:
    """Axes in scope by their names; see `dynamiq_jax.psum`.

    Raises:
      ValueError: not the names of different axes that are in scope.
    """
    names = axis_names(axis_name)
    sizes = [checks.check_axis(name, axis_name) for name in names]
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r} does not name different axes. Give one, such as 'data', or "
            "several with the slowest link first, such as ('hosts', 'local')."
        )
    fast = tuple(zip(names[1:], sizes[1:], strict=True))
    return Axes(names[0], sizes[0], fast)
