"""The backend of the Mosaic GPU kernels."""

import jax

from pallas_kernels._jax.compat import has_mosaic_gpu, override
from pallas_kernels._mosaic_gpu import kernels
from pallas_kernels.pallas_backend import GpuBackend


class MosaicGpu(GpuBackend):
    """Mosaic GPU kernels for NVIDIA GPUs from Hopper on."""

    name = "mosaic_gpu"
    capability = 9.0  # Hopper

    statistics = staticmethod(kernels.statistics)
    hop = staticmethod(kernels.hop)
    decompress_accumulate = staticmethod(kernels.decompress_accumulate)
    decompress = staticmethod(kernels.decompress)

    @override
    def why_not_lowered(self) -> str | None:
        if has_mosaic_gpu():
            return None
        return f"the Mosaic GPU backend of Pallas in JAX {jax.__version__} lacks what it needs"
