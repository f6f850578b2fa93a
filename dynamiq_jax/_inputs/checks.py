"""Checks of input while tracing. Errors name the argument, show its value and give a remedy."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import MistakeError
from dynamiq_jax.methods import ChunkedMethod, Method
from pallas_kernels._jax import compat

_NO_NUMBERS = frozenset("USOMm")  # kinds of dtypes: strings, objects, dates and times


def check_key(key: Any, axis_names: Sequence[str]) -> Array:
    """Return a PRNG key, typed or raw of the default generator, as a typed one.

    Raises:
      TypeError: no PRNG key.
      ValueError: several keys, or different keys on the workers.
    """
    if getattr(key, "dtype", None) == jnp.uint32 and key.ndim == 1:  # of jax.random.PRNGKey
        default = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        if key.shape != default.shape:
            raise ValueError(
                f"key has shape {key.shape}, but raw keys of the default generator have shape "
                f"{default.shape}. Give a typed key of the other generator, such as "
                "jax.random.key(step, impl='rbg') or jax.random.wrap_key_data(key, impl='rbg')."
            )
        key = jax.random.wrap_key_data(jnp.asarray(key))
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(
            f"key={key!r:.80} is not a PRNG key. Give one, such as jax.random.key(step), the same "
            "on all workers."
        )
    if key.shape != ():
        raise ValueError(
            f"key has shape {key.shape}: it holds several keys. Give a single one, the same on all "
            "workers."
        )
    for axis_name in axis_names:
        if axis_name in compat.varying_axes(key):
            raise ValueError(
                f"key differs between the workers of axis {axis_name!r}. Give all of them the same "
                "one: do not fold in lax.axis_index, and pass it into shard_map with in_specs=P(). "
                "Workers share their rounding noise so that errors cancel."
            )
    return key


def check_not_reduced(path: str, leaf: Array, axis_names: Sequence[str]) -> None:
    """Raise ValueError for a leaf that is reduced already, by its type under `check_vma=True`."""
    for axis_name in axis_names:
        if axis_name in compat.unreduced_axes(leaf):
            raise ValueError(
                f"tree{path} is unreduced over axis {axis_name!r} inside shard_map, whose types do "
                "not become varying. Give it to dq.psum outside of shard_map, or make the map with "
                "check_vma=False."
            )
        if compat.tracks_varying(axis_name) and axis_name not in compat.varying_axes(leaf):
            raise MistakeError(
                "double reduction",
                f"tree{path} does not vary over axis {axis_name!r}: it is already summed. Inside "
                "shard_map, jax.grad with respect to replicated parameters returns gradients that "
                "are summed over the axis, exactly and uncompressed; summing again would make them "
                "n times too large. Before jax.grad, mark the parameters: params = "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying'), of which an nnx module is "
                "split first. Or leave the step as it is, and give it to dq.compress. If they are "
                "marked, the leaf may be of a wrapper around the all-reduce: put optax.MultiSteps "
                "and optax.apply_if_finite behind dq.all_reduce_gradients, in one optax.chain.",
            )


def check_not_state(path: str, axis_names: Sequence[str]) -> None:
    """Raise ValueError for a leaf that is, by its name, the state of a layer and no gradient."""
    if "_overwrite_with_gradient" not in path:  # collection of flax: `flax.linen.fp8_ops`
        return
    axes = axis_names[0] if len(axis_names) == 1 else tuple(axis_names)
    raise ValueError(
        f"tree{path} is no gradient: the backward pass returns the next state of this leaf, such "
        "as the amax history of an FP8 layer, whatever the loss is scaled by. A sum or mean of it "
        "over workers has no meaning. In a jax.shard_map, take it out of the gradients before "
        f"dq.pmean, and give it to jax.lax.pmax(state, {axes!r}). If the leaf has no gradient, "
        "return jnp.zeros_like of it from jax.custom_vjp."
    )


def check_not_split(path: str, spec: Any, dimension: int, argument: str) -> None:
    """Raise ValueError if `specs` already shards the dimension that is scattered or gathered."""
    if dimension < len(spec) and spec[dimension] is not None:
        raise ValueError(
            f"{argument}={dimension} is the dimension of tree{path} that specs={spec} splits over "
            f"{spec[dimension]!r}. Each device would get rows of another place. Give another "
            f"{argument}, or specs that split another dimension."
        )


def named_leaves(tree: Any) -> tuple[list[tuple[str, Array]], Any]:
    """Return the leaves of a tree as arrays, with the names for errors, and its structure.

    Raises:
      TypeError: a leaf is not an array or number.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named = []
    for path, leaf in paths_and_leaves:
        if isinstance(leaf, bool | int | float | complex | np.number):
            leaf = jnp.asarray(leaf)
        name = jax.tree_util.keystr(path)
        check_leaf(name, leaf)
        named.append((name, leaf))
    return named, structure


def check_leaf(path: str, leaf: Any) -> None:
    """Raise TypeError for a leaf that is not an array or number."""
    kind = leaf.dtype if hasattr(leaf, "dtype") and hasattr(leaf, "shape") else None
    is_number = kind is not None and not jnp.issubdtype(kind, jax.dtypes.prng_key)
    if not is_number or getattr(kind, "kind", "") in _NO_NUMBERS:
        of_dtype = f" of dtype {kind}" if is_number else ""
        raise TypeError(
            f"tree{path} is a {type(leaf).__name__}{of_dtype}, which cannot be sent. Give a pytree "
            "of arrays of numbers; of an nnx module, nnx.state(model, nnx.Param)."
        )


def check_floating(name: str, tree: Any, why: str) -> None:
    """Raise TypeError for a leaf that is not floating; `why` follows its dtype."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"{name}{jax.tree_util.keystr(path)} has dtype {dtype}, {why}")


def check_chunked(method: Method, function: str) -> None:
    """Raise ValueError for a method that a half of the all-reduce cannot use."""
    if not isinstance(method, ChunkedMethod):
        raise ValueError(
            f"method={method!r} cannot be used in {function}. Use one that compresses chunks, "
            "such as dq.DynamiQ()."
        )
