"""Fused Mosaic kernels for TPUs.

From the bottom up: `vectors`, `words`, `blocks`, `message`, `rows`, `transfers`, `launch`,
`widths`, `backend`.
"""

from pallas_kernels._mosaic_tpu.backend import MosaicTpu

__all__ = ["MosaicTpu"]
