"""PTX instructions for operations that JAX lowers to more instructions than the hardware needs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import implementation
from pallas_kernels.codec.arithmetic import PLAIN, WHOLE, Arithmetic, code_to_float


def arithmetic() -> Arithmetic:
    """Return the operations of a Triton kernel; the plain ones if it is interpreted."""
    return PLAIN if implementation.interpreting() else _PTX


def bytes_to_float(words: Array, index: Array) -> Array:
    """Convert byte `index`, 0 to 3, of uint32 words to float32. Shapes broadcast."""
    if implementation.interpreting():
        shift = index.astype(jnp.uint32) * np.uint32(8)
        return code_to_float((words >> shift) & np.uint32(0xFF))
    # One byte permutation makes the bits of byte + WHOLE: three bytes of that and the byte.
    words = lax.bitcast_convert_type(words, jnp.int32)  # Triton has no unsigned result
    bits = _instruction("prmt.b32", jnp.int32)(words, WHOLE.view(np.int32), index + 0x7650)
    return lax.bitcast_convert_type(bits, jnp.float32) - WHOLE


def _instruction(ptx: str, dtype: DTypeLike = jnp.float32) -> Callable[..., Array]:
    """Return a PTX instruction as a function of values of 32 bits that broadcast."""
    register = "f" if dtype == jnp.float32 else "r"

    def apply(*operands: Any) -> Array:
        from jax.experimental.pallas import triton

        values = jnp.broadcast_arrays(*map(jnp.asarray, operands))
        names = ", ".join(f"${i}" for i in range(len(values) + 1))
        (result,) = triton.elementwise_inline_asm(
            f"{ptx} {names};",
            args=values,
            constraints=",".join(["=" + register] + [register] * len(values)),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(values[0].shape, dtype)],
        )
        return result

    return apply


def _nearest_whole(value: Array) -> tuple[Array, Array]:
    whole = value + WHOLE  # XLA would cancel this, Triton does not
    return whole - WHOLE, lax.bitcast_convert_type(whole, jnp.uint32)


# Triton never contracts a product and a sum, and guards roots and reciprocals against subnormals,
# of which there are none here.
_PTX = Arithmetic(
    multiply_add=_instruction("fma.rn.f32"),
    multiply_to_one=_instruction("mul.rn.sat.f32"),
    sqrt=_instruction("sqrt.approx.ftz.f32"),
    reciprocal=_instruction("rcp.approx.ftz.f32"),
    ceil=jnp.ceil,
    nearest_whole=_nearest_whole,
)
