"""NumPy oracle of block formats: what a block's numbers mean, in float64, and where bytes lie.

It shares no code with the library. Where a float32 operation decides a code, it does that one in
float32.
"""

import numpy as np
from numpy.typing import NDArray

from tests.support import oracle

TINY = 2.0**-126  # smallest normal number of float32 and of bfloat16


def covering_step(spans: NDArray, levels: int) -> NDArray[np.float64]:
    """The smallest normal bfloat16 of which `levels` cover each span, 0 of a span of 0."""
    quotient = np.asarray(spans, np.float64) / levels
    _, exponent = np.frexp(quotient)
    unit = np.ldexp(1.0, exponent - 8)  # of a bfloat16, whose significand has 8 bits
    steps = np.maximum(np.ceil(quotient / unit) * unit, TINY)
    return np.where(np.asarray(spans) < TINY, 0.0, steps)


def bf16_below(values: NDArray) -> NDArray[np.float64]:
    """The largest bfloat16 not above each value."""
    values = np.asarray(values, np.float64)
    _, exponent = np.frexp(values)
    unit = np.ldexp(1.0, exponent - 8)
    return np.floor(values / unit) * unit


def bf16_bits(values: NDArray) -> NDArray[np.uint16]:
    """Bits of values that are bfloat16 already."""
    words = np.asarray(values, np.float32).view(np.uint32)
    assert not np.any(words & 0xFFFF)
    return (words >> 16).astype(np.uint16)


def inverse(steps: NDArray) -> NDArray[np.float32]:
    """1 / step in float32, and 0 of 0."""
    steps = np.asarray(steps, np.float32)
    safe = np.where(steps == 0, np.float32(1), steps)
    return np.where(steps == 0, np.float32(0), np.float32(1) / safe)


def payload(codes: NDArray, bits: int, *sides: NDArray) -> NDArray[np.uint8]:
    """The message: planes of codes [rows, 256] one after the other, then the sides as they are."""
    packed = oracle.pack_codes(codes.astype(np.uint16), bits)
    stops = np.cumsum([32 * width for _, width in oracle.planes(bits)])[:-1]
    planes = [plane.ravel() for plane in np.split(packed, stops, axis=1)]
    return np.concatenate(
        [*planes, *(side.astype(side.dtype).view(np.uint8).ravel() for side in sides)]
    )
