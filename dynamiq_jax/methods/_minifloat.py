"""Elements and scales of the OCP Microscaling (MX) formats, in codes of 4 to 8 bits.

Standard: Open Compute Project, Microscaling Formats Specification v1.0, September 2023. Everything
is integer arithmetic on the bits of float32. A scale of 2^-127 is subnormal, which backends flush,
so a multiplication by it would lose normal numbers.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

BLOCK_SIZE = 32  # coordinates that share a scale
ONE = 127  # byte of the scale 1: E8M0 has the exponents of float32, biased as they are
NAN_SCALE = 255  # byte of the scale NaN

_MANTISSA_BITS = 23  # of float32
_HIDDEN = 1 << _MANTISSA_BITS  # the bit that normal numbers do not store, and the smallest normal
_INF_BITS = np.int32(255 << _MANTISSA_BITS)
_NAN_BITS = np.int32(_INF_BITS | 1 << _MANTISSA_BITS - 1)
_SIGN_BIT = np.int32(-(2**31))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """Format of elements: sign, exponent and mantissa, with subnormals.

    Values are rounded to nearest, ties to even, and saturate.
    """

    exponent_bits: int
    mantissa_bits: int  # without the hidden bit
    bias: int  # of the exponent
    max_code: int  # of the largest finite magnitude; those above, if any, are Inf and NaN
    infinity: int | None = None  # magnitude code of Inf, if there is one
    twos_complement: bool = False  # form of negative codes; otherwise a sign bit on top

    @property
    def bits(self) -> int:
        """Bits of a code, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite magnitude, emax of the standard."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal magnitude."""
        return 1 - self.bias


# INT8 has up to 127 steps of 2^-6. As magnitudes these are one binade of normal numbers with six
# bits of mantissa, and its subnormals. The standard leaves -128 to the implementation: it is never
# written here, so that both signs round alike, and read as -2.
ELEMENTS = {
    "e4m3": Element(exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E),
    "e5m2": Element(exponent_bits=5, mantissa_bits=2, bias=15, max_code=0x7B, infinity=0x7C),
    "e3m2": Element(exponent_bits=3, mantissa_bits=2, bias=3, max_code=0x1F),
    "e2m3": Element(exponent_bits=2, mantissa_bits=3, bias=1, max_code=0x1F),
    "e2m1": Element(exponent_bits=2, mantissa_bits=1, bias=1, max_code=0x7),
    "int8": Element(exponent_bits=1, mantissa_bits=6, bias=1, max_code=0x7F, twos_complement=True),
}


def block_scales(maxima: Array, element: Element) -> Array:
    """Compute the E8M0 scales of blocks: 2^(floor(log2 amax) - emax).

    Exponents are clipped to -127 .. 127 (standard, section 6.3). By the standard's choice, a
    largest value between max and 2^(emax + 1) scales saturates: e4m3 loses up to 12.5 % of it, e2m1
    25 %. `maxima` are bits of max |x| of each block, uint32; NaN and Inf give the scale NaN.
    """
    exponents = (maxima >> np.uint32(_MANTISSA_BITS)).astype(jnp.int32)
    scales = jnp.maximum(exponents - element.max_exponent, 0)
    return jnp.where(exponents == 255, np.int32(NAN_SCALE), scales).astype(jnp.uint8)


def encode(values: Array, scales: Array, element: Element) -> Array:
    """Encode values / scales to uint16, rounded to nearest even and saturating.

    Subnormals count as zero, as in the sums of XLA:CPU. NaN and Inf saturate: the scale of their
    block is NaN. Scales are E8M0 bytes, uint8 of a shape that broadcasts.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    magnitudes = bits & np.int32(2**31 - 1)
    codes = _round_magnitudes(magnitudes, scales.astype(jnp.int32), element)
    if element.twos_complement:
        codes = jnp.where(bits < 0, -codes, codes) & (2**element.bits - 1)
    else:
        codes = codes | jnp.where(bits < 0, np.int32(1 << (element.bits - 1)), np.int32(0))
    return codes.astype(jnp.uint16)


def decode(codes: Array, scales: Array, element: Element) -> Array:
    """Decode uint16 codes times scales: exact where that is a normal float32, else zero, or Inf.

    Scales are as in `encode`; NaN makes all of its block NaN.
    """
    words, exponents = codes.astype(jnp.int32), scales.astype(jnp.int32)
    sign_bit = 1 << (element.bits - 1)
    negative = words >= sign_bit
    if element.twos_complement:
        magnitudes = jnp.where(negative, 2 * sign_bit - words, words)
    else:
        magnitudes = words & (sign_bit - 1)
    bits = _magnitude_bits(magnitudes, exponents, element)
    bits = jnp.where(negative, bits | _SIGN_BIT, bits)
    bits = jnp.where(exponents == NAN_SCALE, _NAN_BITS, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _round_magnitudes(magnitudes: Array, scales: Array, element: Element) -> Array:
    """Round bits of magnitudes under scales, both int32, to codes without signs: int32."""
    significands = (magnitudes & (_HIDDEN - 1)) | _HIDDEN
    excess = (magnitudes >> _MANTISSA_BITS) - scales - element.min_exponent
    # Subnormal codes drop more bits. Two more than the mantissa drop all bits, and the half.
    below = jnp.clip(-excess, 0, element.mantissa_bits + 2)
    drop = _MANTISSA_BITS - element.mantissa_bits + below
    half = jnp.left_shift(jnp.ones_like(drop), drop - 1)
    is_odd = (significands >> drop) & 1
    rounded = (significands + half - 1 + is_odd) >> drop
    # The hidden bit adds one to the exponent, and so does a carry of the rounding.
    codes = (jnp.maximum(excess, 0) << element.mantissa_bits) + rounded
    return jnp.where(magnitudes < _HIDDEN, 0, jnp.minimum(codes, element.max_code))


def _magnitude_bits(magnitudes: Array, scales: Array, element: Element) -> Array:
    """Convert codes without signs under scales, both int32, to the bits of float32: int32."""
    fields = magnitudes >> element.mantissa_bits
    fractions = magnitudes & (2**element.mantissa_bits - 1)
    normal = fractions | (1 << element.mantissa_bits)
    wholes = jnp.where(fields > 0, normal, fractions)
    powers = jnp.maximum(fields, 1) - element.bias - element.mantissa_bits + scales - ONE
    bits = _scale_by_power(wholes, powers)
    if element.max_code < 2 ** (element.bits - 1) - 1:
        bits = jnp.where(magnitudes > element.max_code, _NAN_BITS, bits)
    if element.infinity is not None:
        bits = jnp.where(magnitudes == element.infinity, _INF_BITS, bits)
    return bits


def _scale_by_power(wholes: Array, powers: Array) -> Array:
    """Compute the bits of wholes * 2^powers, both int32, wholes from 0 to 2^24.

    The result is zero below the normal numbers and Inf above.
    """
    bits = lax.bitcast_convert_type(wholes.astype(jnp.float32), jnp.int32)
    fields = (bits >> _MANTISSA_BITS) + powers
    is_normal = (wholes > 0) & (fields > 0)
    scaled = jnp.where(fields < 255, bits + (powers << _MANTISSA_BITS), _INF_BITS)
    return jnp.where(is_normal, scaled, 0)
