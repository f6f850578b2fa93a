"""A function for every worker: under `jax.vmap` of a global program, or under `jax.shard_map`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, PartitionSpec

from dynamiq_jax._inputs.shards import context_or_automatic, names_of
from dynamiq_jax._worker_loss.in_specs import axes_of
from dynamiq_jax._worker_loss.replicas import place

P = PartitionSpec
Transform = Literal["vmap", "shard_map"]
Trees = Mapping[str, list[Any]]  # arrays, or their specs, by role

# Errors of JAX where the mesh of a kernel or of a constraint has no manual axes.
_OTHER_MESH = (
    "should match the mesh passed to shard_map",
    "should be of type `Manual`",
    "contains a manual axes",
)
_USE_VMAP = (
    "transform='shard_map', but the loss has a jax.shard_map or a sharding constraint over the "
    "whole mesh, of which the axes of the workers, {}, are manual here. Give transform='vmap'."
)


@dataclasses.dataclass(frozen=True)
class WorkerMap:
    """Map over the workers of some axes of a mesh, by a transformation of JAX."""

    mesh: Mesh
    axes: tuple[str, ...]
    transform: Transform
    check_vma: bool | None

    def check(self) -> None:
        """Raise ValueError for an unknown transformation, or for `check_vma` beside "vmap"."""
        if self.transform not in get_args(Transform):
            raise ValueError(
                f"transform={self.transform!r} is not supported. Give one of {get_args(Transform)}."
            )
        if self.check_vma is not None and self.transform != "shard_map":
            raise ValueError(
                f"check_vma={self.check_vma!r} is an argument of jax.shard_map, but transform is "
                f"{self.transform!r}. Leave it out, or give transform='shard_map'."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes for collectives.

        The names under `vmap` differ from the names of the mesh. Otherwise a collective in a
        `shard_map` of the loss would be over one worker, and silently do nothing.
        """
        if self.transform == "shard_map":
            return self.axes
        return tuple(f"{axis} of jax.vmap" for axis in self.axes)

    @property
    def count(self) -> int:
        """Number of workers."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def map(
        self, function: Callable[[Trees], tuple[Any, Any]], specs: Trees, arrays: Trees
    ) -> tuple[Any, Any]:
        """Call a function for every worker. Collectives over the workers' axes work in it.

        Args:
          function: function of a worker's parts of the arrays to its own results, and to results
            that are the same on all workers.
          specs: spec of each array over the workers, by role.
          arrays: arrays by role.

        Returns:
          Results of each worker, stacked [workers, *shape], and results of all workers.
        """
        mapped = self._shard_map if self.transform == "shard_map" else self._vmap
        return mapped(function, specs, arrays)

    def check_context(self) -> None:
        """Raise ValueError inside a map over the workers, or where another mesh is set."""
        context = jax.sharding.get_abstract_mesh()
        for axis in self.axes:
            if axis in context.manual_axes:
                raise ValueError(
                    f"dq.data_parallel and dq.value_and_grad split rows over axis {axis!r}, but "
                    "are called inside a jax.shard_map over it, where each worker has its own rows "
                    "already. Call them outside of it, or average gradients here: dq.pmean after "
                    "jax.grad, or dq.pcast before it."
                )
        if not context.empty and dict(context.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"mesh has the axes {dict(self.mesh.shape)}, but the mesh of the context has "
                f"{dict(context.shape)}. Give the one that was given to jax.set_mesh."
            )

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
            out_specs=(P(self.axes), P()),
            axis_names=set(self.axes),
            check_vma=bool(self.check_vma),
        )
        try:
            return mapped(arrays)
        except ValueError as error:
            if not any(words in str(error) for words in _OTHER_MESH):
                raise
            raise ValueError(_USE_VMAP.format(self.axes)) from error

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
        for axis, name in reversed(list(zip(self.axes, self.names, strict=True))):
            over = {
                role: [0 if axis in axes_of(spec) else None for spec in specs[role]]
                for role in arrays
            }
            mapped = jax.vmap(
                mapped,
                in_axes=(over,),
                out_axes=(0, None),
                axis_size=self.mesh.shape[axis],
                axis_name=name,
                spmd_axis_name=axis,
            )
        try:
            own, same = mapped(split)
        except (NameError, ValueError) as error:
            message = self._names_axes(str(error))
            if not message:
                raise
            raise ValueError(message) from error
        count = len(self.axes)
        return jax.tree.map(lambda leaf: leaf.reshape(self.count, *leaf.shape[count:]), own), same

    def _names_axes(self, error: str) -> str:
        """Return the text of an error for a loss that names the workers' axes, or an empty one."""
        if "spmd_axis_name" in error:
            return (
                f"transform='vmap', but the loss names an axis of the workers, {self.axes}, in the "
                "specs of a jax.shard_map or of a sharding constraint. Its arrays are the part of "
                "one worker, on the devices of this worker alone. Leave these axes out of the "
                f"specs, as in P('fsdp') for P(('{self.axes[0]}', 'fsdp'))."
            )
        for axis in self.axes:
            if f"unbound axis name: {axis}" in error or f"{axis!r} is not an axis here" in error:
                return (
                    f"transform='vmap', but the loss calls a collective over axis {axis!r} of the "
                    "workers. Give transform='shard_map', in which they are a manual axis."
                )
        return ""

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
        used = [name for name in self.axes if name in places]
        order = [places[name] for name in used]
        order += [n for n in range(len(shape)) if n not in order]
        rest = [P.UNCONSTRAINED] * (len(shape) - len(used))
        return place(array.reshape(shape).transpose(order), self.mesh, P(*used, *rest))
