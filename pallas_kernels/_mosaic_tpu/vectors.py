"""A block of places in vector registers.

A register holds 8 sublanes of 128 lanes. A lane is a place of the block, and the sublanes of a
register are 8 coordinates of its row: the scales, the width and the hash of a row are then the same
in all registers, and a maximum over a row is nearly all elementwise.

The lanes are not in the order of the places: `place_of_lane` is the one in which a plane of the
wire format lands after the cheapest transposition (`swap`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.codec.packing import SUPER_GROUP_SIZE

SUBLANES, LANES = 8, 128
VECTOR = SUBLANES, LANES
PLACES = LANES  # of a block
HALVES = SUPER_GROUP_SIZE // LANES  # of a row
VECTORS = SUPER_GROUP_SIZE // SUBLANES  # of the values of a block
EIGHTHS = 8  # of a row: each has one bit in every byte of a plane
QUARTERS = 4  # vectors of an eighth: the bytes of a word
U32, I32, F32 = jnp.uint32, jnp.int32, jnp.float32


def place_of_lane(lane: Any) -> Any:
    """Return the place, in a block, of a lane: an integer, or one that is traced."""
    return ((lane & 7) << 4) + (lane >> 3)


def places_of_lanes() -> Array:
    """Return the place, in a block, of every lane: int32 [8, 128]."""
    return place_of_lane(iota(1))


def lane_of_places(places: Array) -> Array:
    """Invert `place_of_lane`, int32 of any shape."""
    return ((places & 15) << 3) + (places >> 4)


def iota(axis: int) -> Array:
    """Return the index along an axis of a register, int32 [8, 128]."""
    return lax.broadcasted_iota(I32, VECTOR, axis)


def sublane(vector: Array, index: int) -> Array:
    """Repeat one sublane in all of them."""
    return jnp.broadcast_to(vector[index : index + 1, :], VECTOR)


def take_lanes(vector: Array, lanes: Array) -> Array:
    """Gather along the lanes: [s, l] of the result is [s, lanes[s, l]] of `vector`."""
    return jnp.take_along_axis(vector, lanes, axis=1, mode="promise_in_bounds")


def swap(vector: Array) -> Array:
    """Exchange sublane s, lane 8 p + q with sublane q, lane 8 p + s.

    It transposes blocks of 8 x 8, and is its own inverse.
    """
    for bit in (1, 2, 4):
        low, high = (iota(axis) & bit != 0 for axis in (0, 1))
        up = pltpu.roll(pltpu.roll(vector, LANES - bit, 1), bit, 0)
        down = pltpu.roll(pltpu.roll(vector, bit, 1), SUBLANES - bit, 0)
        vector = jnp.where(low == high, vector, jnp.where(low, up, down))
    return vector


def over_segments(
    vector: Array, size: int, combine: Callable[[Array, Array], Array] = jnp.maximum
) -> Array:
    """Combine every `size` neighboring sublanes, and repeat the result in all of them."""
    distance = 1
    while distance < size:
        above = pltpu.roll(vector, distance, 0)
        if 2 * distance < SUBLANES:
            below = pltpu.roll(vector, SUBLANES - distance, 0)
            above = jnp.where(iota(0) & distance != 0, above, below)
        vector = combine(vector, above)
        distance *= 2
    return vector


def bits_of(values: Array) -> Array:
    """Return the bits of float32 values, uint32."""
    return lax.bitcast_convert_type(values, U32)


def as_float(bits: Array) -> Array:
    """Invert `bits_of`."""
    return lax.bitcast_convert_type(bits, F32)
