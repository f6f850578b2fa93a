"""The backend of the Mosaic TPU kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._jax.compat import override
from pallas_kernels._mosaic_tpu import kernels, widths, words
from pallas_kernels.backend import Backend, Operation, takes_messages
from pallas_kernels.codec.layout import Layout
from pallas_kernels.pallas_backend import PallasBackend

# TPUs that kernels compile for, by the names that JAX gives them: v5e, v5p and v6e.
_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
# Operations whose kernels hold the messages of all chunks one by one. Others hold all at once.
_ONE_BY_ONE = (Backend.energies, Backend.decompress, Backend.decompress_sums)


class MosaicTpu(PallasBackend):
    """Mosaic kernels for TPUs from v5e on, whose messages are words."""

    name = "mosaic_tpu"
    platform = "tpu"
    message_dtype = jnp.uint32

    statistics = staticmethod(widths.statistics)
    hop = staticmethod(kernels.hop)
    decompress_accumulate = staticmethod(kernels.decompress_accumulate)
    decompress = staticmethod(kernels.decompress)
    solve = staticmethod(widths.solve)
    energies = staticmethod(widths.energies)
    scaled_sums = staticmethod(kernels.scaled_sums)
    decompress_sums = staticmethod(kernels.decompress)

    @override
    def why_not_on_devices(self) -> str | None:
        if jax.default_backend() != "tpu":
            return "the default devices are not TPUs"
        kinds = {device.device_kind for device in jax.local_devices() if device.platform == "tpu"}
        for unknown in sorted(kinds - set(_KINDS)):
            return f"its kernels are compiled for TPU v5e, v5p and v6e, and this is a {unknown!r}"
        return None

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        reason = super().why_not_for(operation, *arrays, layout=layout)
        if reason or layout is None or not takes_messages(operation):
            return reason
        # A hop also writes a message.
        return words.why_too_large(layout, 1 if operation in _ONE_BY_ONE else len(arrays[0]) + 1)
