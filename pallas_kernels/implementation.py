"""Choice of the backend that runs an operation."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
from jax import lax

from pallas_kernels import compat

Implementation = Literal["xla", "triton", "mosaic_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

Backends = Mapping[str, Callable[..., Any]]

# Compute capability that a backend needs; the fastest first.
_CAPABILITIES = {"triton": 8.0, "mosaic_gpu": 9.0}
_INDEX_LIMIT = 2**31  # elements of an array that kernels reach by 32-bit indices
_without_gpu: contextvars.ContextVar[str | None] = contextvars.ContextVar("mode", default=None)


def check(implementation: str | None) -> None:
    """Check that a backend can run on this machine.

    Raises:
      ValueError: the named backend does not exist, or this machine cannot run it.
    """
    if implementation is None or implementation == "xla":
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not a backend of this version. Use None (the "
            f"fastest one) or one of {IMPLEMENTATIONS}."
        )
    reason = _why_not(implementation)
    if reason:
        raise ValueError(
            f"implementation={implementation!r} cannot run here: {reason}. Use None (the fastest "
            "one) or 'xla'."
        )


def run(implementation: str | None, backends: Backends, *args: Any, **kwargs: Any) -> Any:
    """Run an operation by the named backend, or by the fastest one for the target platform.

    Args:
      implementation: name of a backend; None for the fastest one.
      backends: the operation in each backend.
      *args: arrays that it takes.
      **kwargs: static arguments that it takes.
    """
    check(implementation)
    if implementation is not None:
        if implementation not in backends:
            raise ValueError(
                f"implementation={implementation!r} does not have this operation. Use None (the "
                f"fastest one) or one of {tuple(backends)}."
            )
        return backends[implementation](*args, **kwargs)
    fastest = {"default": lambda *args: backends["xla"](*args, **kwargs)}
    small = all(getattr(leaf, "size", 1) < _INDEX_LIMIT for leaf in jax.tree.leaves(args))
    for name in _CAPABILITIES if small else ():
        if name in backends and _why_not(name) is None:
            fastest["cuda"] = lambda *args, name=name: backends[name](*args, **kwargs)
            break
    return lax.platform_dependent(*args, **fastest)


@contextlib.contextmanager
def without_gpu(mode: Literal["interpret", "compile"]) -> Iterator[None]:
    """Allow kernels to be traced on a machine that cannot run them.

    They are interpreted, slowly, or compiled for another machine.
    """
    token = _without_gpu.set(mode)
    try:
        yield
    finally:
        _without_gpu.reset(token)


def interpreting() -> bool:
    """Return whether kernels are interpreted."""
    return _without_gpu.get() == "interpret"


def is_for_this_machine() -> bool:
    """Return whether kernels are compiled for this machine: neither interpreted nor for another."""
    return _without_gpu.get() is None


def _why_not(implementation: str) -> str | None:
    """Return the reason why this machine cannot run a backend; None if it can."""
    if implementation == "triton" and not compat.has_triton():
        return f"JAX {jax.__version__} has no Triton backend of Pallas"
    if implementation == "mosaic_gpu" and not compat.has_mosaic_gpu():
        return f"the Mosaic GPU backend of Pallas in JAX {jax.__version__} lacks what it needs"
    if _without_gpu.get():
        return None
    if jax.default_backend() != "gpu":
        return "the default devices are not GPUs"
    devices = [device for device in jax.local_devices() if device.platform == "gpu"]
    capability = min(map(_compute_capability, devices))
    needed = _CAPABILITIES[implementation]
    if capability < needed:
        return f"it needs compute capability {needed}, and this GPU has {capability}"
    return None


def _compute_capability(device: jax.Device) -> float:
    """Return the compute capability of a GPU of NVIDIA; 0 for others, which name architectures."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:
        return 0.0
