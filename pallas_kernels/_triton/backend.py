"""The backend of the Triton kernels."""

import jax

from pallas_kernels._jax.compat import has_triton, override
from pallas_kernels._triton import kernels
from pallas_kernels.pallas_backend import GpuBackend


class Triton(GpuBackend):
    """Triton kernels for NVIDIA GPUs from Ampere on."""

    name = "triton"
    capability = 8.0  # Ampere

    statistics = staticmethod(kernels.statistics)
    hop = staticmethod(kernels.hop)
    decompress_accumulate = staticmethod(kernels.decompress_accumulate)
    decompress = staticmethod(kernels.decompress)

    @override
    def why_not_lowered(self) -> str | None:
        return None if has_triton() else f"JAX {jax.__version__} has no Triton backend of Pallas"
