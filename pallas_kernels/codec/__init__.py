"""The DynamiQ codec in pure JAX: the specification in `docs/wire_format.md`.

Every kernel reproduces it. Nothing here communicates. From the bottom up: `arithmetic`, `packing`,
`bit_planes`, `levels`, `rounding`, `scales`, `rows`, `allocation`, `layout`, `ordering`.
"""

from pallas_kernels.codec import bit_planes, packing, scales
from pallas_kernels.codec.allocation import Allocation
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout, Quantizer, TabulatedQuantizer
from pallas_kernels.codec.ordering import (
    LocalRows,
    Places,
    make_places,
    place_rows,
    rank,
    restore_rows,
)
from pallas_kernels.codec.packing import MAX_WIDTH, SUPER_GROUP_SIZE, WIDTHS, row_bytes
from pallas_kernels.codec.rounding import offsets
from pallas_kernels.codec.rows import l2_norm

WIRE_FORMAT = 1  # version of `docs/wire_format.md`: another one for any change of bytes or meaning
