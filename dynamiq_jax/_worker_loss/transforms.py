"""A function for every worker: under `jax.vmap` of a global program, or under `jax.shard_map`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, PartitionSpec

from dynamiq_jax._buckets.replicas import place
from dynamiq_jax._inputs.shards import context_or_automatic, names_of
from dynamiq_jax._worker_loss.in_specs import axes_of

P = PartitionSpec
Transform = Literal["vmap", "shard_map"]
Trees = Mapping[str, list[Any]]  # arrays, or their specs, by role


@dataclasses.dataclass(frozen=True)
class Workers:
    """Workers of some axes of a mesh, and the transformation that runs a function for each."""

    mesh: Mesh
    names: tuple[str, ...]
    transform: Transform
    check_vma: bool

    def check(self) -> None:
        """Raise ValueError for a transformation that does not exist, or has no such check."""
        if self.transform not in get_args(Transform):
            raise ValueError(
                f"transform={self.transform!r} is not supported. Give one of {get_args(Transform)}."
            )
        if not self.check_vma and self.transform != "shard_map":
            raise ValueError(
                f"check_vma=False is an argument of jax.shard_map, but transform is "
                f"{self.transform!r}, which has no such check. Leave it out, or give "
                "transform='shard_map'."
            )

    @property
    def count(self) -> int:
        """Number of workers."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    def map(
        self, function: Callable[[Trees], tuple[Any, Any]], specs: Trees, arrays: Trees
    ) -> tuple[Any, Any]:
        """Call a function for every worker. Collectives over the workers' axes work in it.

        Args:
          function: function of a worker's parts of the arrays to what it has of its own, and to
            what is the same on all workers.
          specs: how arrays are split over the workers, by role: a spec for each.
          arrays: arrays by role.

        Returns:
          What workers have of their own, stacked [workers, *shape], and what is the same.
        """
        mapped = self._shard_map if self.transform == "shard_map" else self._vmap
        return mapped(function, specs, arrays)

    def _shard_map(
        self, function: Callable[[Trees], tuple[Any, Any]], specs: Trees, arrays: Trees
    ) -> tuple[Any, Any]:
        def stacked(arrays: Trees) -> tuple[Any, Any]:
            own, same = function(arrays)
            return jax.tree.map(lambda leaf: leaf[None], own), same

        mapped = jax.shard_map(
            stacked,
            mesh=context_or_automatic(self.mesh),
            in_specs=(specs,),
            out_specs=(P(self.names), P()),
            axis_names=set(self.names),
            check_vma=self.check_vma,
        )
        return mapped(arrays)

    def _vmap(
        self, function: Callable[[Trees], tuple[Any, Any]], specs: Trees, arrays: Trees
    ) -> tuple[Any, Any]:
        split = {
            role: [
                self._in_front(leaf, spec) for leaf, spec in zip(leaves, specs[role], strict=True)
            ]
            for role, leaves in arrays.items()
        }
        mapped: Callable[..., Any] = function
        for name in reversed(self.names):
            over = {
                role: [0 if name in axes_of(spec) else None for spec in specs[role]]
                for role in arrays
            }
            mapped = jax.vmap(
                mapped,
                in_axes=(over,),
                out_axes=(0, None),
                axis_size=self.mesh.shape[name],
                axis_name=name,
                spmd_axis_name=name,
            )
        own, same = mapped(split)
        count = len(self.names)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[count:]), own), same

    def _in_front(self, array: Any, spec: PartitionSpec) -> Any:
        """Split dimensions by the axes that a spec names, and put these axes in front."""
        if not axes_of(spec):
            return array
        shape: list[int] = []
        places: dict[str, int] = {}  # of axes in the new shape
        for size, dimension in zip(array.shape, (*spec, *[None] * array.ndim), strict=False):
            for name in names_of(dimension):
                places[name] = len(shape)
                shape.append(self.mesh.shape[name])
                size //= self.mesh.shape[name]
            shape.append(size)
        used = [name for name in self.names if name in places]
        order = [places[name] for name in used]
        order += [n for n in range(len(shape)) if n not in order]
        rest = [P.UNCONSTRAINED] * (len(shape) - len(used))
        return place(array.reshape(shape).transpose(order), self.mesh, P(*used, *rest))
