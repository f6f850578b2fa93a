"""Base of backends whose operations are kernels of Pallas."""

import abc
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels import modes
from pallas_kernels._jax.compat import override
from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec.layout import Layout

_INDEX_LIMIT = 2**31  # elements of an array that kernels reach by 32-bit indices


class PallasBackend(Backend):
    """Kernels that can also be interpreted, or compiled for another machine.

    In these modes (`pallas_kernels.modes`), the devices of this machine do not matter, and nothing
    is checked.
    """

    def why_not_lowered(self) -> str | None:
        """Return the reason why this version of JAX has no such kernels; None if it has."""
        return None

    @abc.abstractmethod
    def why_not_on_devices(self) -> str | None:
        """Return the reason why a default device of this process cannot run kernels, or None."""

    @override
    def why_not_here(self) -> str | None:
        reason = self.why_not_lowered()
        if reason or not modes.is_for_this_machine():
            return reason
        return self.why_not_on_devices()

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        largest = max(getattr(leaf, "size", 1) for leaf in jax.tree.leaves(arrays))
        if largest < _INDEX_LIMIT:
            return None
        return (
            f"an array has {largest:,} elements, and its kernels count to {_INDEX_LIMIT - 1:,}, "
            "which smaller buckets do not reach"
        )

    @override
    def needs_check(self) -> bool:
        return modes.is_for_this_machine()


class GpuBackend(PallasBackend):
    """Kernels for NVIDIA GPUs."""

    platform = "cuda"
    capability: ClassVar[float]  # compute capability of NVIDIA that the kernels need

    @override
    def why_not_on_devices(self) -> str | None:
        if jax.default_backend() != "gpu":
            return "the default devices are not GPUs"
        gpus = (device for device in jax.local_devices() if device.platform == "gpu")
        least = min(map(_compute_capability, gpus))
        if least < self.capability:
            return f"it needs compute capability {self.capability}, and this GPU has {least}"
        return None

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        # Not all compilers of kernels convert floats of 8 bits, and none is tried with them.
        for dtype in map(jnp.result_type, jax.tree.leaves(arrays)):
            if jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) < 16:
                return f"its kernels load rows of 16 bits or more, and these are {dtype}"
        return super().why_not_for(operation, *arrays, layout=layout)


def _compute_capability(device: jax.Device) -> float:
    """Return the compute capability of a GPU of NVIDIA; 0 for others, which name architectures."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:
        return 0.0
