"""The shared library of the native codec: loaded once, or the reason why it is not used.

LLVM joins a product that is only added to something to one instruction, which rounds once, where it
optimizes at all and where it may use such an instruction. It does neither with
`jax_disable_most_optimizations` and `--xla_backend_optimization_level=0`, nor with
`--xla_cpu_max_isa=AVX`, for example. The base then rounds twice, and its bytes are others.
"""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels import modes
from pallas_kernels._jax.own_thread import first_line, in_own_thread
from pallas_kernels._native.build import LIBRARY, SWITCH, sources_digest, switch

CALLS = (
    *("statistics", "hop", "decompress_accumulate", "scaled_sums", "decompress", "sort"),
    *("block_hop", "block_accumulate", "block_decompress"),
    *("sparse_encode", "sparse_decode", "copies"),
)
PATH = Path(__file__).with_name(LIBRARY)
_PATIENCE = 120.0  # seconds for the compiler
_LANES = 256  # XLA may compute single numbers without LLVM


def target(operation: str) -> str:
    """Return the name of an operation among the custom calls of a process, and in errors of JAX."""
    return f"dynamiq_native_{operation}"


def why_not_here() -> str | None:
    """Return the reason why programs do not use the native library now; None if they do.

    Raises:
      ValueError: the environment variable `SWITCH` has a value that is not possible.
    """
    if switch("Give 0 to run without the native codec, or 1 to use it where it is.") == "0":
        return f"{SWITCH}=0"
    if not modes.is_for_this_machine():
        return "kernels are interpreted, or compiled for another machine"
    # The check of the first use runs on the default devices.
    if jax.default_backend() != "cpu":
        return "the default devices are not CPUs"
    return why_not()


@functools.cache
def why_not() -> str | None:
    """Return the reason why this process has no native codec; None if it has one.

    The first call loads the library and registers its custom calls.
    """
    if not PATH.exists():
        return (
            "the native codec was not compiled when the package was built, which takes a C++ "
            "compiler"
        )
    try:
        library = ctypes.CDLL(str(PATH))
        handlers = {name: getattr(library, f"dynamiq_{name}") for name in CALLS}
        sources = _text(library.dynamiq_sources)
        set_of_cpu = _text(library.dynamiq_instruction_set)
        is_of_other_sources = sources != sources_digest()
    except (OSError, AttributeError) as error:
        return f"{PATH.name} does not load: {error}"
    if is_of_other_sources:
        return f"{PATH.name} was compiled from other sources: install the package again"
    if set_of_cpu is None:
        return "the native codec needs a CPU with AVX2 and FMA, or AArch64"
    # A version of XLA that is older than the headers of the library refuses its calls: here, where
    # the devices are there already, and otherwise later, when nothing works without them.
    jax.default_backend()
    try:
        for name, handler in handlers.items():
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(target(name), capsule, platform="cpu")
    except Exception as error:
        return f"JAX {jax.__version__} does not take {PATH.name}: {error}"
    return None


def instruction_set() -> str:
    """Return the instruction set that the native codec, which is there, uses: such as `avx2`."""
    return str(_text(ctypes.CDLL(str(PATH)).dynamiq_instruction_set))


def _text(function: Any) -> str | None:
    """Call a function of the library that returns a text or a null pointer."""
    function.restype = ctypes.c_char_p
    text = function()
    return None if text is None else text.decode()


def why_not_fused() -> str | None:
    """Return the reason why programs that are compiled now may not round as the library does.

    None if they round a product and a sum once: a program of one line shows it for the settings.
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
        return f"no program shows how XLA rounds here: {first_line(error)}"
    if is_fused:
        return None
    return (
        "XLA compiles without fused products here, and its codec then has other bytes "
        "(jax_disable_most_optimizations or XLA_FLAGS)"
    )
