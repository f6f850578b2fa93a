"""Permutation of the rows of a bucket that makes consecutive pieces of it alike.

The pieces of a bucket get equal bytes. If they were consecutive, those with large values would have
much more error than a bucket whose bits go to all of its large values.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Static permutation of rows: of each `pieces` consecutive ones, every piece gets one.

    A piece gets row r of the consecutive ones at r plus a hash of their number, modulo `pieces`.
    Without the hash, one piece would have all large rows of a matrix whose rows are `pieces` of
    these.
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
        piece = (place + self._shifts()[:, None]) % self.pieces
        return self._take(dealt, piece * self.rows + jnp.arange(self.rows)[:, None])

    def places(self, piece: Array) -> Array:
        """Return the places in the bucket of the coordinates of pieces: int32 [coordinates].

        Args:
          piece: indices of some pieces, int32 [number of them].
        """
        first = self._rows_of(piece).reshape(-1, 1) * self.granule
        return (first + jnp.arange(self.granule)).reshape(-1)

    def _rows_of(self, piece: Array) -> Array:
        """Return the rows of the bucket that pieces hold, int32 [number of pieces, rows]."""
        place = (piece[:, None] - self._shifts()) % self.pieces
        return jnp.arange(self.rows, dtype=jnp.int32) * self.pieces + place

    def _shifts(self) -> Array:
        """Return a hash of the numbers of all groups of rows: int32 [rows], below `pieces`."""
        # Arithmetic rather than a table, which would be a large constant in every program.
        bits = jnp.arange(1, self.rows + 1, dtype=jnp.uint32)
        for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
            bits = bits * jnp.uint32(factor)
            bits = bits ^ (bits >> shift)
        return (bits % jnp.uint32(self.pieces)).astype(jnp.int32)

    def _take(self, flat: Array, rows: Array) -> Array:
        table = flat.reshape(-1, self.granule).at[rows.reshape(-1)]
        return table.get(mode="promise_in_bounds", unique_indices=True).reshape(-1)
