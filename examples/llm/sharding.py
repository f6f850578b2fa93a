"""Where the arrays of a run are: parameters and moments are cut over the axis "fsdp"."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WHOLE_BELOW = 1024  # elements: to cut the weight of a norm would save nothing


def fsdp_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Choose how an array is cut over "fsdp": along the longest axis that divides evenly.

    The choice depends on the shape alone: gradients and moments are cut like their parameters.
    """
    parts = mesh.shape["fsdp"]
    even = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if not even or math.prod(shape) < WHOLE_BELOW:
        return P()
    longest = max(even, key=lambda axis: shape[axis])
    return P(*[None] * longest, "fsdp")


def fsdp_specs(tree: Any, mesh: Mesh) -> Any:
    """Choose how the arrays of a tree are cut over "fsdp"."""
    return jax.tree.map(lambda leaf: fsdp_spec(leaf.shape, mesh), tree)


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree of `PartitionSpec`."""
    is_spec = lambda leaf: isinstance(leaf, P)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def placed(shapes: Any, shardings: Any) -> Any:
    """Return a tree of shapes with its shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
