"""Stripes: buckets that each have a like share of every leaf, so that all of them are alike.

The rows of 256 coordinates of a leaf are dealt to the stripes in turn. What is left of each leaf
after the last whole turn is joined, and dealt as well.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax._buckets.cutting import cut
from pallas_kernels._jax import compat
from pallas_kernels.codec import SUPER_GROUP_SIZE as ROW

# Stripes beyond the fewest that are tried for a number that no leaf has a structure of.
_TRIED = 32
# Coordinates of a small leaf, and of neighbors that are dealt as one. Compilers take long for loops
# that carry thousands of arrays. A leaf that is dealt with others needs memory once more, so that
# only a part of all coordinates is.
_SMALL, _TOGETHER, _PART = 2**17, 2**20, 0.75
# A row on a TPU is two lines of 128 lanes, one after the other. As one line of 256, rows of several
# stripes are interleaved in a register: XLA then needs another copy of all leaves to take them.
_LINES = (2, ROW // 2)


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Place of a bucket among those that share its leaves."""

    number: int
    count: int


@dataclasses.dataclass(frozen=True)
class Stripes:
    """Stripes of some leaves, each [rows, columns]. The columns are dealt, in groups of 256."""

    columns: tuple[int, ...]  # of each leaf
    count: int  # stripes

    @property
    def size(self) -> int:
        """Columns of a stripe, padding included."""
        return ROW * (sum(self._turns) + self._turns_of_rest)

    @property
    def _turn(self) -> int:
        return ROW * self.count

    @property
    def _turns(self) -> list[int]:
        """Return how often every stripe gets a row of each leaf."""
        return [columns // self._turn for columns in self.columns]

    @property
    def _rest(self) -> int:
        return sum(columns % self._turn for columns in self.columns)

    @property
    def _turns_of_rest(self) -> int:
        return -(-self._rest // self._turn)

    @property
    def _groups(self) -> list[list[int]]:
        """Return the columns of whole turns of each leaf, in groups that are dealt as one.

        Rows keep their order, so that stripes are the same as without groups.
        """
        groups: list[list[int]] = []
        left = _PART * sum(self.columns)  # that may still be joined
        for columns in (turns * self._turn for turns in self._turns if turns):
            group = groups[-1] if groups else []
            # A leaf that is alone so far is joined along with the one that comes to it.
            joined = columns + sum(group[:1] if len(group) == 1 else [])
            small = max([columns, *group]) <= _SMALL and columns + sum(group) <= _TOGETHER
            if group and small and joined <= left:
                group.append(columns)
                left -= joined
            else:
                groups.append([columns])
        return groups

    def deal(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        """Return leaves [rows, columns] and their rest, as [rows, turns, count, 2, 128].

        Small neighbors are joined.
        """
        ends = [turns * self._turn for turns in self._turns]
        whole = iter(_columns(leaf, 0, end) for leaf, end in zip(leaves, ends, strict=True) if end)
        parts = [_joined(list(itertools.islice(whole, len(group)))) for group in self._groups]
        if self._rest:
            left = [
                _columns(leaf, end, leaf.shape[1])
                for leaf, end in zip(leaves, ends, strict=True)
                if end < leaf.shape[1]
            ]
            rest = lax.concatenate(left, 1)
            padding = self._turns_of_rest * self._turn - self._rest
            parts.append(jnp.pad(rest, ((0, 0), (0, padding))))
        return tuple(part.reshape(len(part), -1, self.count, *_LINES) for part in parts)

    def zeros(self, rows: int, dealt: Sequence[Array]) -> tuple[Array, ...]:
        """Return zeros like dealt leaves, with another number of rows."""
        shapes = [(rows, *part.shape[1:]) for part in dealt]
        return tuple(
            compat.match_varying(jnp.zeros(shape, part.dtype), part)
            for shape, part in zip(shapes, dealt, strict=True)
        )

    def take(self, dealt: Sequence[Array], number: Array) -> Array:
        """Return the stripe of a number: [rows, size]."""
        index = _index(number, dealt[0])
        parts = [
            lax.dynamic_slice(part, index, (*part.shape[:2], 1, *_LINES)).reshape(len(part), -1)
            for part in dealt
        ]
        return lax.concatenate(parts, 1)

    def put(self, dealt: Sequence[Array], number: Array, stripe: Array) -> tuple[Array, ...]:
        """Return dealt leaves in which the stripe of a number has other values, [rows, size]."""
        index = _index(number, dealt[0])
        pieces = cut(stripe, [part.shape[1] * ROW for part in dealt])
        return tuple(
            lax.dynamic_update_slice(part, piece.reshape(*part.shape[:2], 1, *_LINES), index)
            for part, piece in zip(dealt, pieces, strict=True)
        )

    def join(self, dealt: Sequence[Array]) -> list[Array]:
        """Invert `deal`."""
        flat = [part.reshape(len(part), -1) for part in dealt]
        left = [columns % self._turn for columns in self.columns]
        rests = iter(
            cut(_columns(flat.pop(), 0, self._rest), filter(None, left)) if self._rest else ()
        )
        whole = itertools.chain.from_iterable(map(cut, flat, self._groups))
        joined = []
        for turns, rest in zip(self._turns, left, strict=True):
            parts = [next(whole)] if turns else []
            parts += [next(rests)] if rest else []
            joined.append(_joined(parts))
        return joined


def _joined(parts: Sequence[Array]) -> Array:
    """Return arrays joined along their columns."""
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)


def _columns(leaf: Array, start: int, stop: int) -> Array:
    """Return some columns of a leaf, without an operation if these are all."""
    whole = stop - start == leaf.shape[1]
    return leaf if whole else lax.slice_in_dim(leaf, start, stop, axis=1)


def _index(number: Array, part: Array) -> tuple[Any, ...]:
    """Return where the stripe of a number begins in dealt leaves, for all of them at once.

    It is unsigned, as JAX checks the sign of others for each leaf, and varies like the leaves.
    """
    zero = jnp.uint32(0)
    return compat.match_varying((zero, zero, number.astype(jnp.uint32), zero, zero), part)


def take_little_time() -> bool:
    """Return whether stripes take little time beside the codec on the default devices.

    XLA for TPUs moves row by row what it deals, and takes longer than kernels take for the codec
    (benchmarks/aot/tpu.py).
    """
    return jax.default_backend() != "tpu"


def number_of_stripes(fewest: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many stripes to cut leaves into, at least `fewest`.

    Where a number divides the rows of 256 in a row of a matrix, each stripe has the same columns of
    all its rows, and the columns of a gradient may differ by magnitudes. So the number is the first
    one that has no divisor in common with any of these, or with as few coordinates as possible.
    """
    if fewest == 1:
        return 1

    def coordinates_in_step(number: int) -> int:
        return sum(
            math.prod(shape)
            for shape in shapes
            if len(shape) > 1 and math.gcd(number, shape[-1] // math.gcd(shape[-1], ROW)) > 1
        )

    return min(range(fewest, fewest + _TRIED), key=coordinates_in_step)
