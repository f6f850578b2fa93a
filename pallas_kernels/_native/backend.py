"""The backend of the native codec."""

from typing import Any

import jax

from pallas_kernels import modes
from pallas_kernels._jax.compat import override
from pallas_kernels._native import launch, library
from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec.layout import Layout


class Native(Backend):
    """C++ for CPUs, on all threads of XLA."""

    name = "native"
    platform = "cpu"
    by_name_alone = True

    statistics = staticmethod(launch.statistics)
    hop = staticmethod(launch.hop)
    decompress_accumulate = staticmethod(launch.decompress_accumulate)
    decompress = staticmethod(launch.decompress)
    scaled_sums = staticmethod(launch.scaled_sums)
    decompress_sums = staticmethod(launch.decompress_sums)

    @override
    def why_not_here(self) -> str | None:
        if not modes.is_for_this_machine():
            return "kernels are interpreted, or compiled for another machine"
        # The check of the first use runs on the default devices.
        if jax.default_backend() != "cpu":
            return "the default devices are not CPUs"
        return library.why_not()

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        return None if layout is None else launch.why_not_for(layout)
