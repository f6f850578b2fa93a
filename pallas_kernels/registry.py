"""The backends of this version, by name."""

from pallas_kernels._mosaic_gpu import MosaicGpu
from pallas_kernels._mosaic_tpu import MosaicTpu
from pallas_kernels._native import Native
from pallas_kernels._triton import Triton
from pallas_kernels._xla import Xla
from pallas_kernels.backend import Backend

BASE: Backend = Xla()  # which runs everywhere, and whose bytes the others reproduce

# Of one platform, the fastest one first.
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (BASE, Triton(), MosaicGpu(), MosaicTpu(), Native())
}
