"""Rows of a bucket, dealt to its shards so that all of them are alike.

Shards get equal bytes. If they were consecutive parts of a bucket, those with large values would
have much more error than others.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from dynamiq_jax.parts.collectives import never
from pallas_kernels.codec.rounding import mix
from pallas_kernels.copies import pad

_ORDERS = 16  # of shifts


@dataclasses.dataclass(frozen=True)
class ShiftedDealing:
    """Static order of the rows of a vector: in each turn, every piece gets one row.

    The vector is padded with zeros to whole turns. Row r of a turn goes to piece r plus a shift,
    modulo `pieces`. If all turns had the same shift, one piece would get all large rows of a matrix
    each of whose rows is a turn. So consecutive turns have all shifts, in an order that seems
    random.
    """

    columns: int  # coordinates of the vector
    pieces: int
    granule: int  # coordinates of a row

    @property
    def size(self) -> int:
        """Coordinates of a piece, padding included."""
        return self.granule * self._rows

    def deal(self, vector: Array) -> Array:
        """Return all pieces of a vector, one after the other: [pieces * size]."""
        whole = pad(vector, self.pieces * self.size)
        return self._gather(whole, self._rows_of(jnp.arange(self.pieces, dtype=jnp.int32)))

    def undeal(self, pieces: Array) -> Array:
        """Invert `deal`: [columns]."""
        place = jnp.arange(self.pieces, dtype=jnp.int32)
        # Equal buckets must not share their shifts. Otherwise XLA for GPUs joins the permutations
        # of all of them, and the first waits for the transfer of the last.
        zeros = jnp.broadcast_to(never(pieces).astype(jnp.uint32), (self._rows,))
        piece = (place[None, :] + self._shifts(zeros)[:, None]) % self.pieces
        number = jnp.arange(self._rows, dtype=jnp.int32)
        rows = self._gather(pieces, piece * self._rows + number[:, None])
        return rows[: self.columns]

    def places(self, piece: Array) -> Array:
        """Return the places in the vector of the coordinates of pieces: int32 [coordinates].

        Places from `columns` on are padding.

        Args:
          piece: indices of some pieces, int32 [number of them].
        """
        first = self._rows_of(piece).reshape(-1, 1) * self.granule
        return (first + jnp.arange(self.granule, dtype=jnp.int32)[None, :]).reshape(-1)

    @property
    def _rows(self) -> int:
        """Rows of a piece, which are as many as turns."""
        return -(-self.columns // (self.granule * self.pieces))

    def _rows_of(self, piece: Array) -> Array:
        """Return the rows of the vector that pieces hold, int32 [number of pieces, rows]."""
        place = (piece[:, None] - self._shifts()[None, :]) % self.pieces
        return jnp.arange(self._rows, dtype=jnp.int32)[None, :] * self.pieces + place

    def _shifts(self, zeros: Array | np.uint32 = np.uint32(0)) -> Array:
        """Return the shifts of all turns, int32 [rows], at least 0 and below `pieces`.

        They are computed when `zeros` are available.
        """
        turn = jnp.arange(self._rows, dtype=jnp.uint32) + zeros
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
