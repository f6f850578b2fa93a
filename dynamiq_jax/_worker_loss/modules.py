"""Flax nnx modules as arguments: parameters to differentiate, and the rest, which a call changes.

Modules of equinox are pytrees, in which only leaves that are no arrays are special. Flax and
equinox are optional: this module uses them only if they are imported already.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def is_module(value: Any) -> bool:
    """Return whether a value is an nnx module."""
    return "flax.nnx" in sys.modules and isinstance(value, _nnx().Module)


def holds_equinox(value: Any) -> bool:
    """Return whether a pytree holds an equinox module."""
    if "equinox" not in sys.modules:
        return False
    kind = sys.modules["equinox"].Module
    nodes = jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(node, kind) for node in nodes)


def split_module(module: Any) -> tuple[Any, Any, Any]:
    """Split a module into its structure, its parameters and the rest of its state."""
    nnx = _nnx()
    structure, params, rest = nnx.split(module, nnx.Param, ...)
    return structure, params, rest


def merge(structure: Any, params: Any, rest: Any, worker: Array | None = None) -> Any:
    """Make a module from its parts, with the random keys of one worker, for dropout of its own.

    Args:
      structure: from `split_module`.
      params: parameters.
      rest: other state.
      worker: index of the worker, int32 scalar; None to keep the keys.
    """
    nnx = _nnx()

    if worker is not None:
        index = worker

        def own(path: Any, variable: Any) -> Any:
            del path
            if not isinstance(variable, nnx.RngKey):
                return variable
            # Stacked layers have an array of keys.
            return variable.replace(fold_in_all(variable.get_value(), index))

        rest = nnx.map_state(own, rest)
    return nnx.merge(structure, params, rest, copy=True)


def fold_in_all(keys: Array, number: int | Array) -> Array:
    """Fold a number into every key of an array of typed keys, of any shape."""
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return folded.reshape(keys.shape)


def rest_of(module: Any, before: Any, axis_names: tuple[str, ...]) -> Any:
    """Return the state of a module besides its parameters, the same on all workers.

    Floating numbers, such as statistics of a batch, are averaged. Integers, such as counters of
    steps, become the largest of all workers. Keys stay the keys from before.

    Raises:
      ValueError: the loss has added state to the module, or removed state.
    """
    _, _, rest = split_module(module)
    paths = [{path for path, _ in jax.tree.leaves_with_path(state)} for state in (rest, before)]
    if differ := sorted(map(jax.tree_util.keystr, paths[0] ^ paths[1])):
        raise ValueError(
            f"The loss adds state to a module or removes it: {', '.join(differ)[:200]}. Each "
            "worker has its own, of its rows. Return it as aux instead, with a role, such as the "
            "result of nnx.pop(model, nnx.Intermediate) for what modules sow."
        )

    def same(after: Any, before: Any) -> Any:
        if jnp.issubdtype(after.dtype, jax.dtypes.prng_key):
            return before
        if jnp.issubdtype(after.dtype, jnp.inexact):
            return lax.pmean(after, axis_names)
        return lax.pmax(after, axis_names)

    return jax.tree.map(same, rest, before)


def without_dropout(value: Any) -> Any:
    """Return a copy of a module without dropout; other values stay as they are."""
    if not is_module(value):
        return value
    copy = _nnx().clone(value)
    copy.set_attributes(deterministic=True, raise_if_not_found=False)
    return copy


def update(module: Any, rest: Any) -> None:
    """Write state back to a module."""
    nnx = _nnx()
    nnx.update(module, rest)


def _nnx() -> Any:
    """Return the package `flax.nnx`, which is imported where a module exists."""
    return sys.modules["flax.nnx"]
