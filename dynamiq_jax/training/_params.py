"""Checks of parameters that all workers share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._inputs.checks import check_floating
from pallas_kernels._jax import compat


def check_shared_params(params: Any, axes: Axes, what: str) -> None:
    """Raise an error for parameters that cannot be averaged, or that differ between workers.

    `what` the workers average of each parameter is named in errors.

    Raises:
      TypeError: a leaf that is not floating.
      ValueError: a leaf that varies over an axis.
    """
    remedy = "Give the floating leaves alone, such as those of nnx.split(model, nnx.Param, ...)."
    check_floating("params", params, f"and no {what}. {remedy}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        varying = compat.varying_axes(leaf) & set(axes.names)
        if varying:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} varies over axis {min(varying)!r}, but all "
                "workers share the parameters. Pass them into shard_map with in_specs=P()."
            )


def check_like(given: Any, wanted: Any, what: str, remedy: str) -> None:
    """Raise ValueError for a tree of another structure, or with other shapes or dtypes."""

    def described(tree: Any) -> list[str]:
        return [
            f"{jax.tree_util.keystr(path)}: {jnp.result_type(leaf)}{list(np.shape(leaf))}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]

    found, expected = described(given), described(wanted)
    if found == expected:  # but the containers may be others
        found, expected = [str(jax.tree.structure(given))], [str(jax.tree.structure(wanted))]
    if found != expected:
        apart = sorted(set(found) ^ set(expected)) or found
        raise ValueError(f"{what}: {'; '.join(apart)[:300]} is in one of both alone. {remedy}")
