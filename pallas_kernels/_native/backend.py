"""The backend of the native codec."""

from typing import Any

from pallas_kernels._jax.compat import override
from pallas_kernels._native import launch, library, products
from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec.layout import Layout


class Native(Backend):
    """C++ for CPUs, on all threads of XLA."""

    name = "native"
    platform = "cpu"
    rounds_as_base = True

    statistics = staticmethod(launch.statistics)
    hop = staticmethod(launch.hop)
    decompress_accumulate = staticmethod(launch.decompress_accumulate)
    decompress = staticmethod(launch.decompress)
    scaled_sums = staticmethod(launch.scaled_sums)
    decompress_sums = staticmethod(launch.decompress_sums)
    sort = staticmethod(launch.sort)

    @override
    def why_not_here(self) -> str | None:
        return library.why_not_here() or products.why_not_fused()

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        return None if layout is None else launch.why_not_for(layout)

    @override
    def details(self) -> str:
        return f"C++ with {library.instruction_set()}"
