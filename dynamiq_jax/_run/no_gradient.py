"""Values that raise an error if they are differentiated."""

from typing import Any

import jax
from jax import Array, lax


def refuse_gradient(flat: Array) -> Array:
    """Return `flat`, and raise an error if it is differentiated.

    The gradient of a rounded value is zero, an error that would otherwise pass unnoticed.
    """
    # A view: under vmap inside jit, `jax.custom_vjp` fails on NumPy arrays.
    return lax.squeeze(_refusing(lax.expand_dims(flat, (0,))), (0,))


@jax.custom_vjp
def _refusing(flat: Array) -> Array:
    return flat


def _refuse(*_: Any) -> Any:
    raise ValueError(
        "Compressed sums (dq.psum, dq.pmean, dq.psum_scatter) cannot be differentiated: rounding "
        "has no useful gradient. Take the gradient first and reduce it afterwards, or use "
        "dq.all_gather, whose transpose is a compressed sum. For a gradient of a gradient, such as "
        "a penalty or a Hessian-vector product, take both of the plain loss, and give the whole "
        "step to dq.compress."
    )


_refusing.defvjp(_refuse, _refuse)
