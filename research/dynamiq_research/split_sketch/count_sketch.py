"""Count sketch: a short summary of a vector that is linear in it (Charikar et al., ICALP 2002).

Usual implementations hash every coordinate to a cell, which is a scatter. Here a whole stretch of
coordinates is rotated by one random shift, so that encoding is additions of contiguous memory, in
a fixed order.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax.parts import as_chunks, match_varying
from pallas_kernels.codec.rounding import mix

MOST_ROWS = 32  # a sketch row takes one bit of each word of signs
_SIGN = np.uint32(1 << 31)
_PLACE = np.uint32(0x9E3779B1)  # odd, so that the places of a stretch map to distinct words

Estimator = Callable[[Sequence[Array]], Array]


@dataclasses.dataclass(frozen=True)
class CountSketch:
    """Hash functions of a sketch of [rows, width] cells.

    The vector is cut into stretches of `width` coordinates. In each sketch row, a stretch is
    rotated by a shift of its own, gets random signs, and is added to the cells. Two coordinates of
    a stretch never share a cell, and two of different stretches share one with probability
    1 / width, independently in each row.
    """

    shifts: Array  # int32 [stretches, rows], below the width
    words: Array  # uint32 [stretches]: what the signs of a stretch are hashed from
    size: int  # coordinates of the vector
    width: int  # cells of a row

    @staticmethod
    def draw(key: Array, size: int, rows: int, width: int) -> "CountSketch":
        """Draw the hash functions from a key, for up to `MOST_ROWS` rows."""
        of_shifts, of_words = jax.random.split(key)
        stretches = num_stretches(size, width)
        shifts = jax.random.randint(of_shifts, (stretches, rows), 0, width, jnp.int32)
        return CountSketch(shifts, jax.random.bits(of_words, (stretches,), jnp.uint32), size, width)

    def encode(self, values: Array) -> Array:
        """Sketch float32 [size]: [rows, width]. The sketch of a sum is the sum of the sketches."""
        stretches = as_chunks(values, 1, self.width).reshape(-1, self.width)
        # Twice as wide, so that no stretch has to be cut where it goes around the end.
        empty = [jnp.zeros(2 * self.width, jnp.float32)] * self.shifts.shape[1]

        def add(cells: list[Array], item: tuple[Array, Array, Array]) -> tuple[list[Array], None]:
            stretch, shifts, word = item
            signs = self._signs(word)
            for row, start in enumerate(shifts):
                here = lax.dynamic_slice(cells[row], (start,), (self.width,))
                here += _flip(stretch, signs, row)
                cells[row] = lax.dynamic_update_slice(cells[row], here, (start,))
            return cells, None

        # A loop updates the cells in place. A gather of all stretches takes thirty times as long on
        # a CPU.
        items = stretches, self.shifts, self.words
        wide = jnp.stack(lax.scan(add, match_varying(empty, values), items)[0])
        return wide[:, : self.width] + wide[:, self.width :]

    def decode(self, cells: Array, estimate: Estimator) -> Array:
        """Return an estimate of each coordinate, [size], from cells, float32 [rows, width].

        Args:
          cells: a sketch, or the sum of several.
          estimate: elementwise function of one estimate for each row, arrays of equal shape.
        """
        wide = jnp.concatenate([cells, cells], axis=1)

        def read(carry: None, item: tuple[Array, Array]) -> tuple[None, Array]:
            shifts, word = item
            signs = self._signs(word)
            rows = [
                _flip(lax.dynamic_slice(wide[row], (start,), (self.width,)), signs, row)
                for row, start in enumerate(shifts)
            ]
            return None, estimate(rows)

        return lax.scan(read, None, (self.shifts, self.words))[1].reshape(-1)[: self.size]

    def _signs(self, word: Array) -> Array:
        """Compute random bits for each place of a stretch, uint32 [width]: one for each row."""
        return mix(word + jnp.arange(self.width, dtype=jnp.uint32) * _PLACE)


def num_stretches(size: int, width: int) -> int:
    """Return the number of coordinates that share a cell."""
    return -(-size // width)


def _flip(values: Array, signs: Array, row: int) -> Array:
    """Multiply values by the signs of a sketch row."""
    bits = lax.bitcast_convert_type(values, jnp.uint32) ^ ((signs << np.uint32(row)) & _SIGN)
    return lax.bitcast_convert_type(bits, jnp.float32)
