"""Rules of an outer step: which changes count, and how parameters follow from them.

`Islands` and servers of other packages share them.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from dynamiq_jax._core import check_number
from dynamiq_jax.islands._decode import decode
from dynamiq_jax.islands.messages import Message

__all__ = ["check_weight", "checked_norm", "clipped", "copies", "hash_of", "leaves_of"]
__all__ += ["take_outer_step", "too_large", "wide"]

Name = TypeVar("Name")
Leaves = Mapping[str, tuple[tuple[int, ...], str]]  # shapes and dtypes by path


def leaves_of(tree: Any) -> Leaves:
    """Return the leaves of a tree, by their paths in messages.

    Args:
      tree: pytree of arrays.
    """
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            np.shape(leaf),
            str(getattr(leaf, "dtype", type(leaf).__name__)),
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def checked_norm(message: Message, leaves: Leaves) -> float:
    """Return the L2 norm of a change, in float64.

    Args:
      message: the change.
      leaves: those of the reference.

    Raises:
      ValueError: a change of other leaves, one that holds NaN or Inf, or one of zeros alone.
    """
    found = {leaf.name: (leaf.shape, leaf.dtype) for leaf in message.leaves}
    if found != leaves:
        raise ValueError(f"it has leaves {found!r:.200}, and the reference {leaves!r:.200}.")
    square = 0.0
    for values in decode(message).values():
        wide = np.asarray(values).astype(np.float64).reshape(-1)
        with np.errstate(over="ignore"):
            square += float(wide @ wide)
    if not math.isfinite(square):
        raise ValueError(f"its norm is {math.sqrt(square)}: it holds NaN or Inf.")
    if not square:
        raise ValueError("its norm is 0: it changes nothing.")
    return math.sqrt(square)


def too_large(norms: Mapping[Name, float], limit: float) -> dict[Name, str]:
    """Return changes that are not of the size of the others, with the reason.

    A norm is compared with the median of all that are not zero, of an even number the lower one of
    the two in the middle: of two changes, the smaller one counts. One alone always counts.

    Args:
      norms: norm of each change.
      limit: largest norm, in medians.
    """
    known = sorted(norm for norm in norms.values() if norm)
    median = known[(len(known) - 1) // 2] if known else math.inf
    return {
        name: f"its norm is {norm:.3g}, above {limit:g} times the median of {median:.3g}."
        for name, norm in norms.items()
        if norm > limit * median
    }


def clipped(norms: Mapping[Name, float]) -> dict[Name, float]:
    """Return the factors that scale changes with norms above the median to the median.

    Args:
      norms: norm of each change that counts.
    """
    if not norms:
        return {}
    known = sorted(norms.values())
    middle = len(known) // 2
    median = (known[middle] + known[-1 - middle]) / 2
    return {name: median / norm for name, norm in norms.items() if norm > median}


def copies(messages: Mapping[Name, Message], limit: float) -> dict[Name, str]:
    """Return changes that copy one before them, with the reason.

    Sparse changes of islands that train on data of their own have few coordinates in common. A copy
    with other values has nearly all.

    Args:
      messages: the changes that count, in order.
      limit: largest share of the nonzero coordinates that two may have in common; 1 for none.
    """
    found: dict[Name, str] = {}
    bodies: dict[bytes, Name] = {}
    places: dict[Name, NDArray[np.int64]] = {}
    for name, message in messages.items():
        if (first := bodies.setdefault(message.body, name)) != name:
            found[name] = f"it has the bytes of the change of {first!r}."
            continue
        if limit >= 1 or not any(form.method == "sparse" for form in message.formats):
            continue
        leaves = [np.asarray(values).reshape(-1) for values in decode(message).values()]
        own = np.flatnonzero(np.concatenate(leaves))
        for other, theirs in places.items():
            common = len(np.intersect1d(own, theirs, assume_unique=True))
            share = common / max(1, min(len(own), len(theirs)))
            if share > limit:
                found[name] = f"it has {share:.0%} of its coordinates from that of {other!r}."
        if name not in found:
            places[name] = own
    return found


def check_weight(name: str, weight: float) -> None:
    """Raise ValueError for a weight that is not positive, or whose sums may overflow.

    Args:
      name: name of the argument, for the error.
      weight: weight of a change.
    """
    check_number(name, weight, np.finfo(np.float64).tiny, 1e300, "a positive number")


@functools.partial(jax.jit, static_argnums=0)
def take_outer_step(
    outer: optax.GradientTransformation, mean: Any, state: optax.OptState, before: Any
) -> tuple[Any, optax.OptState]:
    """Return the reference and the state of the outer optimizer after a mean change.

    Args:
      outer: the outer optimizer.
      mean: weighted mean of the changes, reference minus parameters.
      state: of the outer optimizer.
      before: the reference.
    """
    updates, state = outer.update(mean, state, wide(before))
    after = jax.tree.map(lambda leaf, u: (wide(leaf) + u).astype(leaf.dtype), before, updates)
    return after, state


def hash_of(tree: Any) -> str:
    """Return a hash of the values of a tree, 16 hexadecimal digits.

    Args:
      tree: pytree of arrays.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def wide(tree: Any) -> Any:
    """Return floating leaves of fewer than 32 bits in float32, in which changes are computed.

    Args:
      tree: pytree of floating arrays.
    """
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32) if leaf.dtype.itemsize < 4 else leaf, tree
    )
