"""Choice of the backend that runs an operation."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import compat

Implementation = Literal["xla", "triton", "mosaic_gpu", "mosaic_tpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

Backends = Mapping[str, Callable[..., Any]]

# Compute capability that a backend needs; the fastest first.
_CAPABILITIES = {"triton": 8.0, "mosaic_gpu": 9.0}
# TPUs that kernels compile for, by the names that JAX gives them: v5e, v5p and v6e.
_TPU_KINDS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")
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
    reason = why_not(implementation)
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
    if small and "mosaic_tpu" in backends and runs_on_tpu():
        fastest["tpu"] = lambda *args: backends["mosaic_tpu"](*args, **kwargs)
    else:
        for name in _CAPABILITIES if small else ():
            if name in backends and why_not(name) is None:
                fastest["cuda"] = lambda *args, name=name: backends[name](*args, **kwargs)
                break
    return lax.platform_dependent(*args, **fastest)


def runs_on_tpu() -> bool:
    """Return whether kernels for TPUs are the default of programs that are traced here."""
    return jax.default_backend() == "tpu" and why_not("mosaic_tpu") is None


def message_dtype(implementation: str | None) -> DTypeLike:
    """Return the type of messages in a program: uint8, or uint32 where kernels for TPUs make them.

    A TPU takes longer to turn words into bytes than the kernels take for all the rest.
    """
    words = runs_on_tpu() if implementation is None else implementation == "mosaic_tpu"
    return jnp.uint32 if words else jnp.uint8


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


def why_not(implementation: str) -> str | None:
    """Return the reason why this machine cannot run a backend; None if it can."""
    if implementation == "triton" and not compat.has_triton():
        return f"JAX {jax.__version__} has no Triton backend of Pallas"
    if implementation == "mosaic_gpu" and not compat.has_mosaic_gpu():
        return f"the Mosaic GPU backend of Pallas in JAX {jax.__version__} lacks what it needs"
    if implementation == "mosaic_tpu" and not compat.has_mosaic_tpu():
        return f"JAX {jax.__version__} has no TPU backend of Pallas"
    if _without_gpu.get():
        return None
    if implementation == "mosaic_tpu":
        return _why_not_on_tpu()
    if jax.default_backend() != "gpu":
        return "the default devices are not GPUs"
    devices = [device for device in jax.local_devices() if device.platform == "gpu"]
    capability = min(map(_compute_capability, devices))
    needed = _CAPABILITIES[implementation]
    if capability < needed:
        return f"it needs compute capability {needed}, and this GPU has {capability}"
    return None


def _why_not_on_tpu() -> str | None:
    """Return the reason why kernels for TPUs cannot run on this machine; None if they can."""
    if jax.default_backend() != "tpu":
        return "the default devices are not TPUs"
    kinds = {device.device_kind for device in jax.local_devices() if device.platform == "tpu"}
    unknown = sorted(kinds - set(_TPU_KINDS))
    if unknown:
        return f"its kernels are compiled for TPU v5e, v5p and v6e, and this is a {unknown[0]!r}"
    return None


def _compute_capability(device: jax.Device) -> float:
    """Return the compute capability of a GPU of NVIDIA; 0 for others, which name architectures."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:
        return 0.0
