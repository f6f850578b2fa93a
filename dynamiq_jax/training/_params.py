"""Checks of parameters that all workers share."""

from typing import Any

import jax
import jax.numpy as jnp

from dynamiq_jax._buckets.axes import Axes
from pallas_kernels._jax import compat


def check_shared_params(params: Any, axes: Axes, what: str) -> None:
    """Raise an error for parameters that cannot be averaged, or that differ between workers.

    Args:
      params: pytree of arrays.
      axes: axes of the workers.
      what: what the workers average of each parameter, for errors.

    Raises:
      TypeError: a leaf that is not floating.
      ValueError: a leaf that varies over an axis.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = f"params{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"{name} has dtype {jnp.result_type(leaf)}, and no {what}. Give the floating "
                "leaves alone, such as those of nnx.split(model, nnx.Param, ...)."
            )
        varying = compat.varying_axes(leaf) & set(axes.names)
        if varying:
            raise ValueError(
                f"{name} varies over axis {min(varying)!r}, but all workers share the parameters. "
                "Pass them into shard_map with in_specs=P()."
            )
