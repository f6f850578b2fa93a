"""Plans of collectives outside of a program, from shapes alone."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from dynamiq_jax._buckets.axes import Axes, axis_names
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._core.validation import is_integer
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._inputs.shards import Shards, leaf_specs, split_over
from dynamiq_jax._plan.plan import Plan, make_plan


def plan_without_arrays(
    tree: Any,
    axis_size: Any,
    request: Request,
    *,
    mesh: Any = None,
    collective: Callable[[Axes], Collective] = AllReduce,
) -> Plan:
    """Plan a collective outside of a program; tree, axes and mesh are those of `wire_report`."""
    axes = _axes(axis_size, mesh)
    named = [_as_traced(*each) for each in jax.tree.leaves_with_path(tree)]
    shards = _shards(named, tree, mesh, request.compression.specs, axes)
    return make_plan(collective(axes), tree, named, shards, request)


def _as_traced(path: Any, leaf: Any) -> tuple[str, jax.ShapeDtypeStruct]:
    """Return the name, and the shape and dtype, of a leaf inside a program.

    Numbers have 32 bits there unless `jax_enable_x64` is set.
    """
    name = jax.tree_util.keystr(path)
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    checks.check_leaf(name, leaf)
    return name, jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _shards(named: list[tuple[str, Any]], tree: Any, mesh: Any, specs: Any, axes: Axes) -> Shards:
    if (mesh is None) != (specs is None):
        given, missing = ("mesh", "specs") if specs is None else ("specs", "mesh")
        raise ValueError(
            f"{missing}=None, but {given} is given. Give both, or whole leaves and neither."
        )
    if mesh is None:
        return Shards({}, (PartitionSpec(),) * len(named))
    further = {
        name: size for name, size in mesh.shape.items() if size > 1 and name not in axes.names
    }
    return split_over(named, leaf_specs(tree, specs), mesh, further)


def _axes(axis_size: Any, mesh: Any) -> Axes:
    given = axis_size if isinstance(axis_size, tuple) else (axis_size,)
    if mesh is None:
        if not given or not all(is_integer(size) and size >= 1 for size in given):
            raise ValueError(
                f"axis_size={axis_size!r} is not a number of workers. Give an integer of at least "
                "1, or a tuple of them, one for each axis. Names of axes need mesh= and specs=."
            )
        return Axes.of({str(number): int(size) for number, size in enumerate(given)})
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"mesh={mesh!r:.80} is not a mesh. Give one, such as "
            "jax.make_mesh((jax.device_count(),), ('data',))."
        )
    for name in given:
        if name not in mesh.axis_names:
            one = "" if name == axis_size else f": {name!r}"
            raise ValueError(
                f"axis_size={axis_size!r}{one} is not an axis of the mesh, whose axes are "
                f"{mesh.axis_names}. Give one of them, or a tuple of several with the slowest link "
                "first, and the mesh as mesh=, or by jax.set_mesh where mesh= may be None."
            )
    return Axes.of({name: mesh.shape[name] for name in axis_names(axis_size, "axis_size")})
