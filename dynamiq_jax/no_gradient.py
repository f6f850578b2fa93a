"""Values that cannot be differentiated, and say so."""

from typing import Any

import jax
from jax import Array


@jax.custom_vjp
def refuse_gradient(flat: Array) -> Array:
    """Identity without a gradient: that of a rounded value is zero, which would pass unnoticed."""
    return flat


def _refuse(*_: Any) -> Any:
    raise ValueError(
        "Compressed collectives (dq.psum, dq.pmean, dq.psum_scatter, dq.all_gather) cannot be "
        "differentiated: rounding has no useful gradient. Take the gradient first and reduce it "
        "afterwards, or differentiate through the collective of jax.lax."
    )


refuse_gradient.defvjp(_refuse, _refuse)
