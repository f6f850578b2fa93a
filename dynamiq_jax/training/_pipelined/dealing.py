"""Permutation of the rows of a bucket that makes consecutive pieces of it alike.

The pieces of a bucket get equal bytes. If they were consecutive, those with large values would have
much more error than a bucket whose bits go to all of its large values.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pallas_kernels._jax.dependencies import zeros_after
from pallas_kernels.codec.rounding import mix

_ORDERS = 16


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Static permutation of rows: of each `pieces` consecutive ones, every piece gets one.

    These are a group, and row r of a group goes to piece r plus a shift, modulo `pieces`. If all
    groups had the same shift, one piece would get all large rows of a matrix each of whose rows is
    a group. So consecutive groups have all shifts, in an order that seems random.
    """

    pieces: int
    rows: int  # in a piece
    granule: int  # coordinates of a row

    @property
    def size(self) -> int:
        """Coordinates of all pieces, padding included."""
        return self.pieces * self.rows * self.granule

    def deal(self, flat: Array) -> Array:
        """Pad a bucket, [at most size], with zeros and permute it into its pieces: [size]."""
        piece = jnp.arange(self.pieces, dtype=jnp.int32)
        return self._take(jnp.pad(flat, (0, self.size - flat.size)), self._rows_of(piece))

    def collect(self, dealt: Array) -> Array:
        """Invert `deal`: [size], of which the first coordinates are the bucket."""
        place = jnp.arange(self.pieces, dtype=jnp.int32)
        # Equal buckets must not share their shifts. Otherwise XLA for GPUs joins the permutations
        # of all of them, and the first waits for the transfer of the last.
        shifts = self._shifts(zeros_after(dealt, (self.rows,), jnp.uint32))
        piece = (place[None, :] + shifts[:, None]) % self.pieces
        number = jnp.arange(self.rows, dtype=jnp.int32)
        return self._take(dealt, piece * self.rows + number[:, None])

    def places(self, piece: Array) -> Array:
        """Return the places in the bucket of the coordinates of pieces: int32 [coordinates].

        Args:
          piece: indices of some pieces, int32 [number of them].
        """
        first = self._rows_of(piece).reshape(-1, 1) * self.granule
        return (first + jnp.arange(self.granule, dtype=jnp.int32)[None, :]).reshape(-1)

    def _rows_of(self, piece: Array) -> Array:
        """Return the rows of the bucket that pieces hold, int32 [number of pieces, rows]."""
        place = (piece[:, None] - self._shifts()[None, :]) % self.pieces
        return jnp.arange(self.rows, dtype=jnp.int32)[None, :] * self.pieces + place

    def _shifts(self, zeros: Array | np.uint32 = np.uint32(0)) -> Array:
        """Return the shifts of all groups, int32 [rows], at least 0 and below `pieces`.

        They are computed when `zeros` are available.
        """
        group = jnp.arange(self.rows, dtype=jnp.uint32) + zeros
        block, place = group // np.uint32(self.pieces), group % np.uint32(self.pieces)
        bits = mix(block + np.uint32(1))
        # One of a few orders and a shift of that. A table of all groups would be a large constant.
        order = jnp.asarray(_orders(self.pieces))[bits % np.uint32(_ORDERS), place]
        return ((order + (bits >> np.uint32(8))) % np.uint32(self.pieces)).astype(jnp.int32)

    def _take(self, flat: Array, rows: Array) -> Array:
        table = flat.reshape(-1, self.granule).at[rows.reshape(-1)]
        return table.get(mode="promise_in_bounds", unique_indices=True).reshape(-1)


def _orders(pieces: int) -> NDArray[np.uint32]:
    """Return permutations that seem random and are the same everywhere: [_ORDERS, pieces]."""
    words: Any = np.arange(1, _ORDERS * pieces + 1, dtype=np.uint32)  # no array of JAX: static
    hashes = np.asarray(mix(words)).reshape(_ORDERS, pieces)
    return np.argsort(hashes, axis=1, kind="stable").astype(np.uint32)
