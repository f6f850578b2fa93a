"""Which backend runs an operation."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
from jax import lax

from dynamiq_jax import compat

Implementation = Literal["xla", "triton"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

Backends = Mapping[str, Callable[..., Any]]

_AMPERE = 8.0  # compute capability
_without_gpu: contextvars.ContextVar[str | None] = contextvars.ContextVar("mode", default=None)


def check(implementation: str | None) -> None:
    """Refuses a backend that cannot run here.

    Raises:
      ValueError: the named backend does not exist, or this machine cannot run it, and why.
    """
    if implementation is None or implementation == "xla":
        return
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not a backend of this version. Use None (the "
            f"fastest that there is) or one of {IMPLEMENTATIONS}."
        )
    reason = _why_no_triton()
    if reason and not _without_gpu.get():
        raise ValueError(
            f"implementation={implementation!r} cannot run here: {reason}. Use None (the fastest "
            "that there is) or 'xla'."
        )


def run(implementation: str | None, backends: Backends, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation by the named backend, or by the fastest for the platform that the program
    is lowered for.
    """
    check(implementation)
    if implementation is not None:
        return backends[implementation](*args, **kwargs)
    fastest = {"default": lambda *args: backends["xla"](*args, **kwargs)}
    if _without_gpu.get() or _why_no_triton() is None:
        fastest["cuda"] = lambda *args: backends["triton"](*args, **kwargs)
    return lax.platform_dependent(*args, **fastest)


@contextlib.contextmanager
def without_gpu(mode: Literal["interpret", "compile"]) -> Iterator[None]:
    """Lets kernels be traced on a machine that cannot run them: to be interpreted, slowly, or to be
    compiled for another machine.
    """
    token = _without_gpu.set(mode)
    try:
        yield
    finally:
        _without_gpu.reset(token)


def interpreting() -> bool:
    """Whether kernels are interpreted."""
    return _without_gpu.get() == "interpret"


def _why_no_triton() -> str | None:
    """Why this machine cannot run Triton kernels, if it cannot."""
    if not compat.has_triton():
        return f"JAX {jax.__version__} has no Triton backend of Pallas"
    if jax.default_backend() != "gpu":
        return "the default devices are not GPUs"
    devices = [device for device in jax.local_devices() if device.platform == "gpu"]
    capability = min(float(getattr(device, "compute_capability", 0)) for device in devices)
    if capability < _AMPERE:
        return f"it needs compute capability {_AMPERE}, and this GPU has {capability}"
    return None
