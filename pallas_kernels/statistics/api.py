"""Public function of the operation `statistics`."""

from jax import Array

from pallas_kernels.implementation import Backends, run
from pallas_kernels.statistics import mosaic_gpu, triton, xla

_BACKENDS: Backends = {
    "xla": xla.statistics,
    "triton": triton.statistics,
    "mosaic_gpu": mosaic_gpu.statistics,
}


def statistics(rows: Array, *, implementation: str | None = None) -> tuple[Array, Array]:
    """L2 norm and mean of every row.

    Args:
      rows: float32, bfloat16 or float16 [rows, 256].
      implementation: backend, see `pallas_kernels.implementation.run`.

    Returns:
      Norms and means, both float32 [rows]; the norm of a row that holds NaN or Inf is not finite.
    """
    return run(implementation, _BACKENDS, rows)
