"""Rows of vectors, dealt to pieces in turns, so that all pieces are alike.

Pieces get equal bytes. If they were consecutive parts of the vectors, those with large values would
have much more error than pieces whose bits go to all large values. A stripe is a piece of many
leaves: all buckets that share these leaves are alike.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets.cutting import copied, cut
from pallas_kernels._jax import compat
from pallas_kernels.codec import SUPER_GROUP_SIZE
from pallas_kernels.copies import Segment, Table

# Coordinates of a small vector, and of neighbors that are dealt as one. Compilers take long for
# loops that carry thousands of arrays. A vector that is dealt with others needs memory once more,
# so that only a part of all coordinates is.
_SMALL, _TOGETHER, _PART = 2**17, 2**20, 0.75
# Shape of a row. On a TPU it is lines of 128 lanes, one after the other. As one line of 256, rows
# of several pieces are interleaved in a register: XLA then needs another copy of all vectors to
# take them.
_ROW = (SUPER_GROUP_SIZE // 128, 128)
# Rows of a piece: XLA for CPUs and GPUs reads and writes them as fast as a slice.
_DISTINCT: Any = {"mode": "promise_in_bounds", "unique_indices": True, "indices_are_sorted": True}

# Numbers of stripes that are tried, for one that does not divide the rows of matrices.
_TRIED = 32

Dealt = tuple[Array, ...]  # rows of vectors, each [batch, rows, lines, lanes]


@dataclasses.dataclass(frozen=True)
class Stripe:
    """Place of a bucket among the buckets that share its leaves."""

    number: int
    count: int


def number_of_stripes(fewest: int, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return how many stripes to cut leaves into, at least `fewest`.

    If the number of stripes divides the number of rows of 256 in a row of a matrix, each stripe has
    the same columns of all rows, and the columns of a gradient may differ by magnitudes. So this
    function returns the first number that is coprime to the rows of 256 of all matrices. If it
    finds none, the matrices that violate this rule have as few coordinates as possible.
    """
    if fewest == 1:
        return 1

    def coordinates_in_step(number: int) -> int:
        return sum(
            math.prod(shape)
            for shape in shapes
            if len(shape) > 1
            and math.gcd(number, shape[-1] // math.gcd(shape[-1], SUPER_GROUP_SIZE)) > 1
        )

    return min(range(fewest, fewest + _TRIED), key=coordinates_in_step)


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Static order of the rows of some vectors: in each turn, every piece gets one row.

    The whole turns of each vector come first. What is left of all vectors is joined, padded with
    zeros, and dealt as well.

    A vector of whole rows is not copied for its whole turns: loops read pieces from its memory, and
    write them there. Other vectors, and small neighbors, are copied; a single one is padded.

    Row r of a turn goes to piece r.
    """

    columns: tuple[int, ...]  # coordinates of each vector
    pieces: int

    @property
    def size(self) -> int:
        """Coordinates of a piece, padding included."""
        return SUPER_GROUP_SIZE * (sum(self._turns) + self._turns_of_rest)

    def deal(self, vectors: Sequence[Array]) -> Dealt:
        """Arrange vectors, each [batch, columns], in whole turns of rows, their rest at the end."""
        sources = [vectors[each][:, self._first_copied(each) :] for each in self._copied]
        copies = iter(copied(sources, self._table))
        parts = [next(copies) if each is None else vectors[each] for each in self._kept]
        return tuple(part.reshape(len(part), -1, *_ROW) for part in (*parts, *copies))

    def undeal(self, dealt: Dealt) -> list[Array]:
        """Invert `deal`."""
        owners = itertools.chain(self._kept, [None])  # the rest, if there is one, is the last
        parts = list(zip(owners, dealt, strict=False))
        copies = [part.reshape(len(part), -1) for each, part in parts if each is None]
        vectors = dict(zip(self._copied, copied(copies, self._table.reversed), strict=True))
        for each, part in parts:
            if each is None:
                continue
            if each in vectors:  # its rest, behind its whole turns
                rest = vectors[each].reshape(len(part), -1, *_ROW)
                first = self._turns[each] * self.pieces
                part = lax.dynamic_update_slice_in_dim(part, rest, first, axis=1)
            vectors[each] = part.reshape(len(part), -1)
        return [vectors[each] for each in range(len(self.columns))]

    def zeros(self, batch: int, dealt: Dealt) -> Dealt:
        """Return zeros like dealt vectors, of another batch."""
        return tuple(
            compat.match_varying(jnp.zeros((batch, *part.shape[1:]), part.dtype), part)
            for part in dealt
        )

    def take(self, dealt: Dealt, number: Array) -> Array:
        """Return the piece of a number, [batch, size], for loops."""
        parts = [
            part.at[:, rows].get(**_DISTINCT).reshape(len(part), -1)
            for part, rows in zip(dealt, self._rows_in(dealt, number), strict=True)
        ]
        return lax.concatenate(parts, 1)

    def put(self, dealt: Dealt, number: Array, piece: Array) -> Dealt:
        """Write a piece, [batch, size], to the place of its number."""
        places = self._rows_in(dealt, number)
        values = cut(piece, [len(rows) * SUPER_GROUP_SIZE for rows in places])
        return tuple(
            part.at[:, rows].set(one.reshape(len(part), -1, *_ROW), **_DISTINCT)
            for part, rows, one in zip(dealt, places, values, strict=True)
        )

    @property
    def _turn(self) -> int:
        """Coordinates of a turn."""
        return SUPER_GROUP_SIZE * self.pieces

    @property
    def _turns(self) -> list[int]:
        """Whole turns of each vector; none of a single one that is padded."""
        is_padded = len(self.columns) == 1 and not self._has_whole_rows(0)
        return [0 if is_padded else columns // self._turn for columns in self.columns]

    @property
    def _left(self) -> list[int]:
        """Columns of each vector behind its whole turns."""
        return [n - turns * self._turn for n, turns in zip(self.columns, self._turns, strict=True)]

    @property
    def _turns_of_rest(self) -> int:
        return -(-sum(self._left) // self._turn)

    def _has_whole_rows(self, vector: int) -> bool:
        """Return whether the vector of this number can be dealt in its own memory."""
        return self.columns[vector] % SUPER_GROUP_SIZE == 0

    @property
    def _groups(self) -> list[list[int]]:
        """Numbers of the vectors with whole turns, in groups that are dealt as one.

        Rows keep their order, so that pieces are the same as without groups.
        """
        groups: list[list[int]] = []
        left = _PART * sum(self.columns)  # that may still be joined
        whole = [turns * self._turn for turns in self._turns]
        for vector, columns in enumerate(whole):
            if not columns:
                continue
            group = [whole[each] for each in groups[-1]] if groups else []
            # A vector that is alone so far is joined along with the one that comes to it.
            joined = columns + sum(group[:1] if len(group) == 1 else [])
            small = max([columns, *group]) <= _SMALL and columns + sum(group) <= _TOGETHER
            if group and small and joined <= left:
                groups[-1].append(vector)
                left -= joined
            else:
                groups.append([vector])
        return groups

    @functools.cached_property
    def _kept(self) -> list[int | None]:
        """Number of the vector that each group is, in its own memory; None for a copy."""
        return [
            group[0] if len(group) == 1 and self._has_whole_rows(group[0]) else None
            for group in self._groups
        ]

    @functools.cached_property
    def _copied(self) -> list[int]:
        """Numbers of the vectors of which something is copied."""
        return [each for each, left in enumerate(self._left) if left or each not in self._kept]

    def _first_copied(self, vector: int) -> int:
        """Return the first column of a vector that is copied."""
        return self._turns[vector] * self._turn if vector in self._kept else 0

    @functools.cached_property
    def _table(self) -> Table:
        """Copies of vectors to groups of whole turns, and to the rest as the last one."""
        source_of = {vector: source for source, vector in enumerate(self._copied)}
        segments = []
        results: list[int] = []
        for kept, group in zip(self._kept, self._groups, strict=True):
            if kept is None:
                ends = [self._turns[vector] * self._turn for vector in group]
                places = itertools.accumulate(ends[:-1], initial=0)
                segments += [
                    Segment(source_of[vector], 0, len(results), at, end)
                    for vector, at, end in zip(group, places, ends, strict=True)
                ]
                results.append(sum(ends))
        at_rest = 0
        for vector, left in enumerate(self._left):
            if left:
                start = self.columns[vector] - left - self._first_copied(vector)
                segments.append(Segment(source_of[vector], start, len(results), at_rest, left))
                at_rest += left
        if self._turns_of_rest:
            results.append(self._turns_of_rest * self._turn)
        sources = [self.columns[each] - self._first_copied(each) for each in self._copied]
        return Table(tuple(segments), tuple(sources), tuple(results))

    def _rows_in(self, dealt: Dealt, number: Array) -> list[Array]:
        """Return the rows of the piece of a number in each dealt vector."""
        turns = [sum(self._turns[vector] for vector in group) for group in self._groups]
        if self._turns_of_rest:
            turns.append(self._turns_of_rest)
        return [
            # Unsigned, as JAX checks the sign of others.
            compat.match_varying(
                jnp.arange(count, dtype=jnp.uint32) * np.uint32(self.pieces)
                + number.astype(jnp.uint32),
                part,
            )
            for count, part in zip(turns, dealt, strict=True)
        ]
