"""PTX instructions for operations that JAX lowers to more instructions than the hardware needs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import modes
from pallas_kernels.codec.arithmetic import PLAIN, Arithmetic, code_to_float, nearest_whole
from pallas_kernels.codec.rounding import half_to_offset


def arithmetic() -> Arithmetic:
    """Return the operations of a Triton kernel; the plain ones if it is interpreted."""
    return PLAIN if modes.interpreting() else _PTX


def bytes_to_float(words: Array, index: Array) -> tuple[Array, Array]:
    """Convert byte `index`, 0 to 3, of uint32 words: a sign above a magnitude of seven bits.

    Shapes broadcast. Returns magnitudes in float32, and words whose top bit is the sign.
    """
    magnitudes = words & np.uint32(0x7F7F7F7F)
    if modes.interpreting():
        above = np.uint32(24) - index.astype(jnp.uint32) * np.uint32(8)
        return code_to_float((magnitudes << above) >> np.uint32(24)), words << above
    # One byte permutation makes the bits of 2^23 + magnitude, with the sign. Its bytes from the
    # top: exponent and sign, twice the sign of the magnitude, which is 0, and the magnitude.
    # (words ^ magnitudes) | exponents, with one constant: the compiler would move two to registers.
    exponents = _on_words("lop3.b32 $0, $1, $2, $3, 0xbe;", words, magnitudes, np.int32(0x4B4B4B4B))
    bits = _permute(magnitudes, exponents, index * 0x1111 + 0x4880)
    return jnp.abs(lax.bitcast_convert_type(bits, jnp.float32)) - np.float32(2**23), bits


def halves_to_offsets(words: Array, half: int, place: Array) -> Array:
    """Convert the low or the high half of uint32 words to rounding offsets / `offset_unit()`."""
    if modes.interpreting():
        return half_to_offset(words >> np.uint32(16 * half))
    # A float32 whose bits are an integer below 2^24 is that integer * 2^-149. The integer here is
    # (h + 1/2) * 2^8: a byte permutation makes it, and no constant has to be subtracted.
    # A constant that the compiler knows would be moved to a register each time.
    constant = (place & np.int32(-(2**31))) | np.int32(0x80)
    bits = _permute(words, constant, np.int32(0x5324 if half else 0x5104))
    return lax.bitcast_convert_type(bits, jnp.float32)


def offset_unit() -> np.float32:
    """Return what the offsets of `halves_to_offsets` are multiples of."""
    return np.float32(1 if modes.interpreting() else 2.0**125)


def select_bits(mask: np.uint32, ones: Array, zeros: Array) -> Array:
    """Take the bits of `ones` where a mask has ones and those of `zeros` elsewhere, uint32."""
    if modes.interpreting():
        return (ones & mask) | (zeros & ~mask)
    # The compiler makes two instructions of it, with a constant in each.
    return _on_words("lop3.b32 $0, $1, $2, $3, 0xe4;", ones, zeros, mask.view(np.int32))


def join_low(first: Array, second: Array, bits: int) -> Array:
    """Join the low 8 or 16 `bits` of uint32 words to twice as many. Those above have no meaning."""
    if modes.interpreting():
        mask = np.uint32(2**bits - 1)
        return (first & mask) | ((second & mask) << np.uint32(bits))
    return _permute(first, second, np.int32(0x5410 if bits == 16 else 0x0040))


def join_top(first: Array, second: Array) -> Array:
    """Join the top bytes of words: the low 16 bits of uint32. The others have no meaning."""
    if modes.interpreting():
        return (first >> np.uint32(24)) | ((second >> np.uint32(24)) << np.uint32(8))
    return _permute(first, second, np.int32(0x0073))


def signs_to_halves(low: Array, high: Array, index: Array) -> Array:
    """Repeat the top bit of byte `index`, 0 to 3, of two uint32 words in a half of one.

    Shapes broadcast. That of `low` is in all of the low half, and that of `high` in the high one.
    """
    if modes.interpreting():
        top = index.astype(jnp.uint32) * np.uint32(8) + np.uint32(7)
        low, high = ((word >> top) & np.uint32(1) for word in (low, high))
        return low * np.uint32(0xFFFF) | high * np.uint32(0xFFFF0000)
    return _permute(low, high, index * 0x1111 + 0xCC88)


def to_float32(values: Array) -> Array:
    """Convert to float32."""
    if values.dtype != jnp.bfloat16 or modes.interpreting():
        return values.astype(jnp.float32)
    # From the word that two share: the compiler would take it apart first.
    split = "shl.b32 a, $2, 16; and.b32 b, $2, -65536; mov.b32 $0, a; mov.b32 $1, b;"
    return _on_pairs(f"{{.reg .b32 a, b; {split}}}", values, "r")


def magnitude_bits(values: Array) -> Array:
    """Return bits of magnitudes, int32, whose maxima are those of |x|.

    They are compared as integers, since Triton's maximum of floats drops NaN.
    """
    if modes.interpreting():
        bounds = jnp.abs(values)
    else:
        # Two neighbors both get their maximum. It takes signs off for free, and the compiler drops
        # what is there twice. Nothing is below its own magnitude, whatever a thread holds.
        larger = "abs.f32 a, $2; abs.f32 b, $3; max.NaN.f32 $0, a, b; mov.f32 $1, $0;"
        bounds = _on_pairs(f"{{.reg .f32 a, b; {larger}}}", values, "f,f")
    return lax.bitcast_convert_type(bounds, jnp.int32)


def _on_pairs(ptx: str, values: Array, registers: str) -> Array:
    """Apply PTX, of results $0 and $1, to pairs of values that a thread holds, to float32."""
    return _inline(ptx, [values], f"=f,=f,{registers}", jnp.float32, pack=2)


def _permute(first: Array, second: Array | np.int32, selector: Array | np.int32) -> Array:
    """Select four of the eight bytes of two uint32 words, from the lowest on."""
    return _on_words("prmt.b32", first, second, selector)


def _on_words(ptx: str, *operands: Array | np.int32) -> Array:
    """Apply an instruction to words, uint32 or int32: uint32, of which Triton has no results."""
    words = (
        lax.bitcast_convert_type(word, jnp.int32) if word.dtype == jnp.uint32 else word
        for word in operands
    )
    return lax.bitcast_convert_type(_instruction(ptx, jnp.int32)(*words), jnp.uint32)


def _instruction(ptx: str, dtype: DTypeLike = jnp.float32) -> Callable[..., Array]:
    """Return a PTX instruction as a function of values of 32 bits that broadcast.

    `ptx` is its name, or all of it, with operands $0, the result, $1 and so on.
    """
    register = "f" if dtype == jnp.float32 else "r"

    def apply(*operands: Any) -> Array:
        values = jnp.broadcast_arrays(*map(jnp.asarray, operands))
        names = ", ".join(f"${i}" for i in range(len(values) + 1))
        text = ptx if "$" in ptx else f"{ptx} {names};"
        return _inline(text, values, ",".join(["=" + register] + [register] * len(values)), dtype)

    return apply


def _inline(
    ptx: str, values: Sequence[Array], constraints: str, dtype: DTypeLike, pack: int = 1
) -> Array:
    """Apply PTX to every `pack` elements that a thread holds of values of one shape."""
    from jax.experimental.pallas import triton

    (result,) = triton.elementwise_inline_asm(
        ptx,
        args=values,
        constraints=constraints,
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values[0].shape, dtype)],
    )
    return result


# Triton never contracts a product and a sum, and guards roots and reciprocals against subnormals,
# of which there are none here.
_PTX = PLAIN._replace(
    multiply_add=_instruction("fma.rn.f32"),
    multiply_subtract=_instruction("{.reg .f32 c; neg.f32 c, $3; fma.rn.f32 $0, $1, $2, c;}"),
    multiply_to_one=_instruction("mul.rn.sat.f32"),
    sqrt=_instruction("sqrt.approx.ftz.f32"),
    reciprocal=_instruction("rcp.approx.ftz.f32"),
    nearest_whole=nearest_whole,
)
