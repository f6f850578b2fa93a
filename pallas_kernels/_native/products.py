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


def why_not_fused() -> str | None:
    """Return the reason why the library may not round as programs that are compiled now.

    It is None if these round a product and a sum once. The first call compiles a program of one
    line. Each change of these settings takes another.
    """
    settings = jax.config.read("jax_disable_most_optimizations"), os.environ.get("XLA_FLAGS")
    return _why_not(settings)


@functools.cache
def _why_not(settings: tuple[object, ...]) -> str | None:
    factor = np.full(_LANES, 1 + 2.0**-12, np.float32)
    rounded = factor * factor

    def probe() -> bool:
        # By single roundings, this is what the product lost: 2^-24. By two, it is zero.
        lost = jax.jit(lambda a, b, c: a * b - c)(factor, factor, rounded)
        return bool(np.all(np.asarray(lost) == np.float32(2.0**-24)))

    try:
        is_fused = in_own_thread(probe, _PATIENCE)
    except Exception as error:  # of any kind: it is that of a compiler
        first_line = str(error).strip().partition("\n")[0]
        return f"no program shows how XLA rounds here: {type(error).__name__}: {first_line:.300}"
    if is_fused:
        return None
    return (
        "XLA compiles without fused products here, and its codec then has other bytes "
        "(jax_disable_most_optimizations or XLA_FLAGS)"
    )
