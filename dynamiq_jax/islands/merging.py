"""Rules of an outer step: which changes count, and how parameters follow from them.

`Islands` and servers of other packages share them.
"""

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from dynamiq_jax._core import check_number
from dynamiq_jax._inputs.policy import paths_of
from dynamiq_jax.islands._decode import decode
from dynamiq_jax.islands.messages import Message

__all__ = ["examine", "hash_of", "leaves_of", "take_outer_step", "too_large"]

Name = TypeVar("Name")
Leaves = Mapping[str, tuple[tuple[int, ...], str]]  # shapes and dtypes by path


class Findings(NamedTuple):
    """Facts of a change on which a decision rests."""

    norm: float  # L2, in float64
    digest: str  # of what the messages hold
    # The nonzero coordinates of a change of sparse messages, counted through all leaves.
    places: NDArray[np.int64] | None


def leaves_of(tree: Any) -> Leaves:
    """Return the leaves of a tree, by their paths in messages.

    Args:
      tree: pytree of arrays.
    """
    return {
        path: (np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__)))
        for path, leaf in zip(paths_of(tree), jax.tree.leaves(tree), strict=True)
    }


def examine(messages: Iterable[Message], leaves: Leaves | None = None) -> Findings:
    """Decode a change once, and return what a decision needs to know of it.

    Args:
      messages: those of the change, one or several; of each only what is found is kept.
      leaves: those of the reference, for a change of one message with whole leaves; None where they
        are already checked.

    Raises:
      ValueError: a change of other leaves, one that holds NaN or Inf, or one of zeros alone.
    """
    square, digest, places = 0.0, hashlib.sha256(), list[NDArray[np.int64]]()
    start, is_sparse = 0, True
    for message in messages:
        found = {leaf.name: (leaf.shape, leaf.dtype) for leaf in message.leaves}
        if leaves is not None and found != leaves:
            raise ValueError(f"it has leaves {found!r:.200}, and the reference {leaves!r:.200}.")
        digest.update(message.body)
        is_sparse &= any(form.method == "sparse" for form in message.formats)
        for values in decode(message).values():
            flat = np.asarray(values).reshape(-1)
            exact = flat.astype(np.float64)
            with np.errstate(over="ignore"):
                square += float(exact @ exact)
            if is_sparse:
                places.append(start + np.flatnonzero(flat))
            start += flat.size
    if not math.isfinite(square):
        raise ValueError(f"its norm is {math.sqrt(square)}: it holds NaN or Inf.")
    if not square:
        raise ValueError("its norm is 0: it changes nothing.")
    together = np.concatenate(places) if is_sparse else None
    return Findings(math.sqrt(square), digest.hexdigest(), together)


def too_large(norms: Mapping[Name, float], limit: float) -> dict[Name, str]:
    """Return changes that are not of the size of the others, with the reason.

    A norm is compared with the median of all that are not zero, of an even number the lower one of
    the two in the middle: of two changes, the smaller one counts. One alone always counts.

    Args:
      norms: norm of each change.
      limit: largest norm, in medians.
    """
    known = [norm for norm in norms.values() if norm]
    median = statistics.median_low(known) if known else math.inf
    return {
        name: f"its norm is {norm:.3g}, above {limit:g} times the median of {median:.3g}."
        for name, norm in norms.items()
        if norm > limit * median
    }


def clipped(norms: Mapping[Name, float]) -> dict[Name, float]:
    """Return the factors that scale changes with norms above the median to the median."""
    if not norms:
        return {}
    median = statistics.median(norms.values())
    return {name: median / norm for name, norm in norms.items() if norm > median}


def copies(changes: Mapping[Name, Findings], limit: float) -> dict[Name, str]:
    """Return changes that copy one before them, with the reason.

    Sparse changes of islands that train on data of their own have few coordinates in common. A copy
    with other values has nearly all. One of an island that splits its leaves in other ways is not
    found. `limit` is the largest share of nonzero coordinates that two may share; 1 for none.
    """
    found: dict[Name, str] = {}
    digests: dict[str, Name] = {}
    places: dict[Name, NDArray[np.int64]] = {}
    for name, change in changes.items():
        if (first := digests.setdefault(change.digest, name)) != name:
            found[name] = f"it has the bytes of the change of {first!r}."
            continue
        if limit >= 1 or change.places is None:
            continue
        for other, theirs in places.items():
            common = len(np.intersect1d(change.places, theirs, assume_unique=True))
            share = common / max(1, min(len(change.places), len(theirs)))
            if share > limit:
                found[name] = f"it has {share:.0%} of its coordinates from that of {other!r}."
        if name not in found:
            places[name] = change.places
    return found


def check_weight(name: str, weight: float) -> None:
    """Raise ValueError for a weight that is not positive, or whose sums may overflow."""
    check_number(name, weight, np.finfo(np.float64).tiny, 1e300, "a positive number")


def take_outer_step(
    outer: optax.GradientTransformation, mean: Any, state: optax.OptState, before: Any
) -> tuple[Any, optax.OptState]:
    """Return the reference and the state of the outer optimizer after a mean change.

    Each operation is a program of its own. In one program, a compiler may round a product and a sum
    once, as it likes for these shapes and this hardware. Then islands of other shardings or
    processors would hold other bits.

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

    It is a sum over all elements, and so the same however leaves are split over devices. It finds
    accidents. Who wants to find two trees of one hash, can.

    Args:
      tree: pytree of arrays.
    """
    one, other = np.asarray(_mixed(jax.tree.leaves(tree)))
    return f"{one:08x}{other:08x}"


@jax.jit
def _mixed(leaves: list[Any]) -> Array:
    """Return two sums of 32 bits over the bits of all elements, mixed with their places."""
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf in enumerate(map(jnp.asarray, leaves)):
        bits = leaf.dtype.itemsize * 8
        if leaf.dtype == jnp.bool:
            leaf, bits = leaf.astype(jnp.uint8), 8
        words = jax.lax.bitcast_convert_type(leaf, f"uint{min(bits, 32)}").astype(jnp.uint32)
        place = jnp.full(words.shape, number + 1, jnp.uint32)
        for dimension in range(words.ndim):
            index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
            place = place * np.uint32(0x9E3779B1) + index
        one = _avalanche(words + _avalanche(place))
        # Of other sums, if those of one are equal.
        other = (one ^ np.uint32(0x85EBCA77)) * (one | 1)
        total += jnp.stack([jnp.sum(mixed, dtype=jnp.uint32) for mixed in (one, other)])
    return total


def _avalanche(x: Array) -> Array:
    """Return numbers of which each bit depends on all bits: the finalizer of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def wide(tree: Any) -> Any:
    """Return floating leaves of fewer than 32 bits in float32, in which changes are computed."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf, jnp.float32) if leaf.dtype.itemsize < 4 else leaf, tree
    )
