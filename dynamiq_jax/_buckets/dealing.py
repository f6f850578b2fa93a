"""Rows of vectors, dealt to pieces in turns, so that all pieces are alike.

Pieces get equal bytes. If they were consecutive parts of the vectors, those with large values would
have much more error than pieces whose bits go to all large values. A stripe is a piece of many
leaves. A shard of a pipelined step is a piece of one bucket.
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
from numpy.typing import NDArray

from dynamiq_jax._buckets.cutting import copied, cut
from pallas_kernels._jax import compat
from pallas_kernels._jax.dependencies import zeros_after
from pallas_kernels.codec import SUPER_GROUP_SIZE
from pallas_kernels.codec.rounding import mix
from pallas_kernels.segments import Segment, Table

# Coordinates of a small vector, and of neighbors that are dealt as one. Compilers take long for
# loops that carry thousands of arrays. A vector that is dealt with others needs memory once more,
# so that only a part of all coordinates is.
_SMALL, _TOGETHER, _PART = 2**17, 2**20, 0.75
# A row on a TPU is lines of 128 lanes, one after the other. As one line of 256, rows of several
# pieces are interleaved in a register: XLA then needs another copy of all vectors to take them.
_LANES = 128
_ORDERS = 16  # of shifts

Dealt = tuple[Array, ...]  # vectors in whole turns, each [batch, turns, pieces, lines, lanes]


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Static order of the rows of some vectors: in each turn, every piece gets one row.

    The whole turns of each vector come first. What is left of all vectors is joined, padded with
    zeros, and dealt as well; a single vector is padded.

    Row r of a turn goes to piece r. With `shifted`, it goes to piece r plus a shift, modulo
    `pieces`. If all turns had the same shift, one piece would get all large rows of a matrix each
    of whose rows is a turn. So consecutive turns have all shifts, in an order that seems random.
    """

    columns: tuple[int, ...]  # coordinates of each vector
    pieces: int
    granule: int = SUPER_GROUP_SIZE  # coordinates of a row
    shifted: bool = False

    @property
    def size(self) -> int:
        """Coordinates of a piece, padding included."""
        return self.granule * (sum(self._turns) + self._turns_of_rest)

    def deal(self, vectors: Sequence[Array]) -> Dealt:
        """Return vectors, each [batch, columns], and their rest in whole turns.

        Small neighbors are joined.
        """
        parts = copied(vectors, self._table)
        return tuple(part.reshape(len(part), -1, self.pieces, *self._lines) for part in parts)

    def undeal(self, dealt: Dealt) -> list[Array]:
        """Invert `deal`."""
        flat = [part.reshape(len(part), -1) for part in dealt]
        return copied(flat, self._table.reversed)

    def zeros(self, batch: int, dealt: Dealt) -> Dealt:
        """Return zeros like dealt vectors, of another batch."""
        shapes = [(batch, *part.shape[1:]) for part in dealt]
        return tuple(
            compat.match_varying(jnp.zeros(shape, part.dtype), part)
            for shape, part in zip(shapes, dealt, strict=True)
        )

    def take(self, dealt: Dealt, number: Array) -> Array:
        """Return the piece of a number, [batch, size], without shifts: a slice, for loops."""
        index = self._index(number, dealt[0])
        parts = [
            lax.dynamic_slice(part, index, (*part.shape[:2], 1, *self._lines)).reshape(
                len(part), -1
            )
            for part in dealt
        ]
        return lax.concatenate(parts, 1)

    def put(self, dealt: Dealt, number: Array, piece: Array) -> Dealt:
        """Replace the piece of a number by other values, [batch, size], without shifts."""
        index = self._index(number, dealt[0])
        values = cut(piece, [part.shape[1] * self.granule for part in dealt])
        return tuple(
            lax.dynamic_update_slice(part, one.reshape(*part.shape[:2], 1, *self._lines), index)
            for part, one in zip(dealt, values, strict=True)
        )

    def take_all(self, dealt: Dealt) -> Array:
        """Return all pieces of one vector of a batch of 1, one after the other: [pieces * size]."""
        (part,) = dealt
        return self._gather(part, self._rows_of(jnp.arange(self.pieces, dtype=jnp.int32)))

    def put_all(self, pieces: Array) -> Dealt:
        """Invert `take_all`."""
        place = jnp.arange(self.pieces, dtype=jnp.int32)
        # Equal buckets must not share their shifts. Otherwise XLA for GPUs joins the permutations
        # of all of them, and the first waits for the transfer of the last.
        shifts = self._shifts(zeros_after(pieces, (self._rows,), jnp.uint32))
        piece = (place[None, :] + shifts[:, None]) % self.pieces
        number = jnp.arange(self._rows, dtype=jnp.int32)
        rows = self._gather(pieces, piece * self._rows + number[:, None])
        return (rows.reshape(1, -1, self.pieces, *self._lines),)

    def places(self, piece: Array) -> Array:
        """Return the places in one vector of the coordinates of pieces: int32 [coordinates].

        Places from `columns` on are padding.

        Args:
          piece: indices of some pieces, int32 [number of them].
        """
        first = self._rows_of(piece).reshape(-1, 1) * self.granule
        return (first + jnp.arange(self.granule, dtype=jnp.int32)[None, :]).reshape(-1)

    @property
    def _turn(self) -> int:
        """Coordinates of a turn."""
        return self.granule * self.pieces

    @property
    def _turns(self) -> list[int]:
        """Whole turns of each vector; none of a single one, which is padded."""
        return [columns // self._turn if len(self.columns) > 1 else 0 for columns in self.columns]

    @property
    def _left(self) -> list[int]:
        """Columns of each vector behind its whole turns."""
        return [n - turns * self._turn for n, turns in zip(self.columns, self._turns, strict=True)]

    @property
    def _rest(self) -> int:
        return sum(self._left)

    @property
    def _turns_of_rest(self) -> int:
        return -(-self._rest // self._turn)

    @property
    def _rows(self) -> int:
        """Rows of a piece."""
        return self.size // self.granule

    @property
    def _lines(self) -> tuple[int, int]:
        """Shape of a row."""
        lanes = math.gcd(self.granule, _LANES)
        return self.granule // lanes, lanes

    @property
    def _groups(self) -> list[list[int]]:
        """Columns of whole turns of each vector, in groups that are dealt as one.

        Rows keep their order, so that pieces are the same as without groups.
        """
        groups: list[list[int]] = []
        left = _PART * sum(self.columns)  # that may still be joined
        for columns in (turns * self._turn for turns in self._turns if turns):
            group = groups[-1] if groups else []
            # A vector that is alone so far is joined along with the one that comes to it.
            joined = columns + sum(group[:1] if len(group) == 1 else [])
            small = max([columns, *group]) <= _SMALL and columns + sum(group) <= _TOGETHER
            if group and small and joined <= left:
                group.append(columns)
                left -= joined
            else:
                groups.append([columns])
        return groups

    @functools.cached_property
    def _table(self) -> Table:
        """Copies of the vectors to groups of whole turns, and to the rest as the last one."""
        groups = [sum(group) for group in self._groups]
        rest = len(groups)
        segments = []
        with_turns = iter(
            (group, at)
            for group, columns in enumerate(self._groups)
            for at in itertools.accumulate(columns[:-1], initial=0)
        )
        at_rest = 0
        for vector, (turns, left) in enumerate(zip(self._turns, self._left, strict=True)):
            end = turns * self._turn
            if turns:
                group, at = next(with_turns)
                segments.append(Segment(vector, 0, group, at, end))
            if left:
                segments.append(Segment(vector, end, rest, at_rest, left))
                at_rest += left
        of_rest = [self._turns_of_rest * self._turn] if self._rest else []
        return Table(tuple(segments), self.columns, (*groups, *of_rest))

    def _index(self, number: Array, part: Array) -> tuple[Any, ...]:
        """Return where the piece of a number begins in dealt vectors, for all of them at once.

        It is unsigned, as JAX checks the sign of others for each vector, and varies like the
        vectors.
        """
        assert not self.shifted
        zero = jnp.uint32(0)
        return compat.match_varying((zero, zero, number.astype(jnp.uint32), zero, zero), part)

    def _rows_of(self, piece: Array) -> Array:
        """Return the rows of one vector that pieces hold, int32 [number of pieces, rows]."""
        place = (piece[:, None] - self._shifts()[None, :]) % self.pieces
        return jnp.arange(self._rows, dtype=jnp.int32)[None, :] * self.pieces + place

    def _shifts(self, zeros: Array | np.uint32 = np.uint32(0)) -> Array:
        """Return the shifts of all turns, int32 [rows], at least 0 and below `pieces`.

        They are computed when `zeros` are available.
        """
        turn = jnp.arange(self._rows, dtype=jnp.uint32) + zeros
        if not self.shifted:
            return jnp.zeros_like(turn, jnp.int32)
        block, place = turn // np.uint32(self.pieces), turn % np.uint32(self.pieces)
        bits = mix(block + np.uint32(1))
        # One of a few orders and a shift of that. A table of all turns would be a large constant.
        order = jnp.asarray(_orders(self.pieces))[bits % np.uint32(_ORDERS), place]
        return ((order + (bits >> np.uint32(8))) % np.uint32(self.pieces)).astype(jnp.int32)

    def _gather(self, values: Array, rows: Array) -> Array:
        table = values.reshape(-1, self.granule).at[rows.reshape(-1)]
        return table.get(mode="promise_in_bounds", unique_indices=True).reshape(-1)


def _orders(pieces: int) -> NDArray[np.uint32]:
    """Return permutations that seem random and are the same everywhere: [_ORDERS, pieces]."""
    words: Any = np.arange(1, _ORDERS * pieces + 1, dtype=np.uint32)  # no array of JAX: static
    hashes = np.asarray(mix(words)).reshape(_ORDERS, pieces)
    return np.argsort(hashes, axis=1, kind="stable").astype(np.uint32)
