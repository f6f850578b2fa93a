"""Parts that methods and topologies of one's own are made of.

The interfaces themselves are in `dynamiq_jax.methods` and `dynamiq_jax.topologies`. The codec is
in `pallas_kernels.codec`.
"""

from dynamiq_jax._core import (
    Payload,
    as_chunks,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    take_chunk,
)
from dynamiq_jax.methods._blockwise import BLOCKS, covering_step, in_blocks, rows_per_chunk
from dynamiq_jax.methods._error_feedback import Feedback
from pallas_kernels._jax.compat import match_varying, override, same_over, vary_over

# What every method needs.
__all__ = ["Payload", "as_chunks", "take_chunk"]
__all__ += ["check_choice", "check_flag", "check_integer", "check_number"]
# The axes over which JAX takes values for different, and the mark of a method that overrides one.
__all__ += ["match_varying", "override", "same_over", "vary_over"]
# What a kind of method needs: blocks with scales, and what a method leaves out.
__all__ += ["BLOCKS", "covering_step", "in_blocks", "rows_per_chunk"]
__all__ += ["Feedback"]
