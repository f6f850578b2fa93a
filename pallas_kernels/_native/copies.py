"""The copies of the native library as a lowering rule of JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from pallas_kernels._native.library import target


def lower(context: Any, *sources: Any, table: NDArray[np.int64]) -> Sequence[Any]:
    """Lower copies to a custom call.

    Args:
      context: context of the lowering rule.
      *sources: values of the program, all [rows, columns].
      table: segments in the order of their results, int64 [segments, 5]: source, start, result,
        start in the result, and length.

    Returns:
      The values of the results, of the shapes that `context` has.
    """
    return jax.ffi.ffi_lowering(target("copies"))(context, *sources, table=table.reshape(-1))
