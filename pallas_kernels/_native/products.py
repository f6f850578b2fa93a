"""Rounding of products in programs of XLA:CPU, which the native codec has to share with the base.

LLVM joins a product that is only added to something to one instruction, which rounds once, where it
optimizes at all and where it may use such an instruction. It does neither with
`jax_disable_most_optimizations` and `--xla_backend_optimization_level=0`, nor with
`--xla_cpu_max_isa=AVX`, for example. The base then rounds twice, and its bytes are others.
"""

import functools
import os

import jax
import numpy as np

from pallas_kernels._jax.own_thread import in_own_thread

_PATIENCE = 120.0  # seconds for the compiler
_LANES = 256  # XLA may compute single numbers without LLVM


def are_fused() -> bool:
    """Return whether programs that are compiled now round a product and a sum once.

    The first call compiles a program of one line. Each change of these settings takes another.

    Raises:
      TimeoutError: the program was not compiled in two minutes.
    """
    settings = jax.config.read("jax_disable_most_optimizations"), os.environ.get("XLA_FLAGS")
    return _compiled(settings)


@functools.cache
def _compiled(settings: tuple[object, ...]) -> bool:
    factor = np.full(_LANES, 1 + 2.0**-12, np.float32)
    rounded = factor * factor

    def probe() -> bool:
        # By single roundings, this is what the product lost: 2^-24. By two, it is zero.
        lost = jax.jit(lambda a, b, c: a * b - c)(factor, factor, rounded)
        return bool(np.all(np.asarray(lost) == np.float32(2.0**-24)))

    return in_own_thread(probe, _PATIENCE)
