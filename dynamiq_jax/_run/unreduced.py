"""Sums in a global view, of arrays whose types are unreduced over explicit axes."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec as P

from dynamiq_jax._buckets.axes import AxisName, axis_names
from dynamiq_jax._inputs.checks import named_leaves

Result = TypeVar("Result")


def is_unreduced(tree: Any) -> bool:
    """Return whether a leaf is a sum over a mesh axis that is still to be done."""
    return any(_unreduced_axes(leaf) for leaf in jax.tree.leaves(tree))


def reduce_unreduced(reduce: Callable[[Any], Result], tree: Any, axis_name: AxisName) -> Result:
    """Reduce the parts of unreduced arrays, as a sum over the axis inside `shard_map` does.

    Raises:
      ValueError: a leaf is unreduced over other axes, or reduced; or this version of JAX has no map
        of unreduced arrays over some axes.
    """
    names = axis_names(axis_name)
    for path, leaf in named_leaves(tree)[0]:
        if differing := _unreduced_axes(leaf) ^ set(names):
            raise ValueError(
                f"tree{path} has type {jax.typeof(leaf)}, but axis_name={axis_name!r}: they differ "
                f"in {sorted(differing)}. Give the axes over which all leaves are unreduced, and "
                "other leaves to another call."
            )
    # Types of unreduced values cannot become varying ones, so they are not checked inside.
    mapped = jax.shard_map(
        reduce,
        in_specs=P(unreduced=set(names)),
        out_specs=P(),
        axis_names=set(names),
        check_vma=False,
    )
    try:
        return mapped(tree)
    except NotImplementedError as error:
        raise ValueError(
            f"JAX {jax.__version__} cannot map over one axis of unreduced arrays. Use a newer one, "
            "or give the whole step to dq.compress, which takes gradients inside of it."
        ) from error


def _unreduced_axes(leaf: Any) -> set[str]:
    if not isinstance(leaf, jax.Array):  # other leaves raise an error later
        return set()
    sharding = getattr(jax.typeof(leaf), "sharding", None)
    return set(sharding.spec.unreduced) if sharding is not None else set()
