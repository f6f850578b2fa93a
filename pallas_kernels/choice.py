"""Choice of the backend that runs an operation."""

import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import first_use, modes
from pallas_kernels._jax.platforms import here, platform_dependent
from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE
from pallas_kernels.registry import BACKENDS, BASE

# By which any operation chooses the same backend.
_ROWS = jax.ShapeDtypeStruct((1, SUPER_GROUP_SIZE), np.float32)
_logger = logging.getLogger("pallas_kernels")


def check(implementation: str | None) -> None:
    """Check that a backend can run on this machine; the fastest one, None, always can.

    Raises:
      ValueError: the named backend does not exist, or this machine cannot run it.
    """
    if implementation is not None:
        _named(implementation)


def message_dtype(implementation: str | None) -> DTypeLike:
    """Return the type of messages in a program: uint8, or uint32 where kernels for TPUs make them.

    A TPU takes longer to turn words into bytes than the kernels take for all the rest.
    """
    if implementation is not None:
        return _named(implementation).message_dtype
    return next((b for b in _candidates() if b.platform == here()), BASE).message_dtype


def run(implementation: str | None, operation: Operation, *arrays: Any, **static: Any) -> Any:
    """Run an operation by the named backend, or by the fastest one for the target platform.

    Raises:
      ValueError: the named backend does not exist, cannot run here, cannot run this operation, or
        is refused by the check of its first use.
    """
    if implementation is not None:
        backend = _named(implementation)
        if reason := backend.why_not_for(operation, *arrays, **static):
            raise ValueError(
                f"implementation={backend.name!r} cannot run this: {reason}. Use None (the fastest "
                "one) or 'xla'."
            )
        if reason := first_use.reason_against(backend, BASE):
            raise ValueError(
                f"implementation={backend.name!r} is refused: {reason}. Use None or 'xla', or set "
                f"{first_use.SWITCH}=0 to use it all the same. `dynamiq-jax verify` says more."
            )
        return backend.run(operation, *arrays, **static)
    chosen = fastest(operation, *arrays, **static)
    if modes.is_for_this_machine():
        _log_default()
    functions = {
        platform: _Run(backend, operation, tuple(static.items()))
        for platform, backend in chosen.items()
    }
    return platform_dependent(functions, *arrays)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Operation of a backend, as a value: calls that are alike are traced once."""

    backend: Backend
    operation: Operation
    static: tuple[tuple[str, Any], ...]  # arguments that are no arrays

    def __call__(self, *arrays: Any) -> Any:
        return self.backend.run(self.operation, *arrays, **dict(self.static))


def fastest(operation: Operation, *arrays: Any, **static: Any) -> dict[str, Backend]:
    """Return the backend that runs an operation by default, for each platform.

    It is the first one of the registry that can run here, and can run this operation, if it passes
    the check of its first use. Elsewhere it is the base, under the name "default".

    A program has one type of messages, that of the default devices. Backends of other types take no
    part: to convert messages takes longer than the base.
    """
    chosen, dtype = {BASE.platform: BASE}, message_dtype(None)
    for backend in _candidates():
        if (
            backend.platform not in chosen
            and backend.message_dtype == dtype
            and backend.why_not_for(operation, *arrays, **static) is None
        ):
            chosen[backend.platform] = backend
    return {
        platform: backend
        for platform, backend in chosen.items()
        if first_use.reason_against(backend, BASE) is None
    }


def is_native() -> bool:
    """Return whether the native codec is the default on CPU devices, also for MXFP8 and alike."""
    native = BACKENDS["native"]
    return fastest(Backend.statistics, _ROWS).get(native.platform) is native


def default() -> str:
    """Describe the backend of programs for the default devices, and the reasons against others.

    It is one line, such as "the codec runs on cpu by 'native' (C++ with avx2)".
    """
    chosen = fastest(Backend.statistics, _ROWS)
    backend = chosen.get(here(), BASE)
    details = f" ({backend.details()})" if backend.details() else ""
    line = f"the codec runs on {here()} by {backend.name!r}{details}"
    against = (
        f"{other.name!r} is not used: {reason}"
        for other in BACKENDS.values()
        if backend is BASE and other.platform == here()
        if (reason := other.why_not_here() or first_use.reason_against(other, BASE))
    )
    return "; ".join((line, *against))


@functools.cache
def _log_default() -> None:
    """Log, once in a process, which backend it uses."""
    _logger.info("%s", default())


def _candidates() -> Iterator[Backend]:
    """Yield the backends that may be the default on this machine, the fastest one first."""
    return (backend for backend in BACKENDS.values() if backend.why_not_here() is None)


def _named(name: str) -> Backend:
    """Return a backend that the user named, and that can run on this machine."""
    if name not in tuple(BACKENDS):
        raise ValueError(
            f"implementation={name!r} is not a backend of this version. Use None (the fastest one) "
            f"or one of {tuple(BACKENDS)}."
        )
    if reason := BACKENDS[name].why_not_here():
        raise ValueError(
            f"implementation={name!r} cannot run here: {reason}. Use None (the fastest one) or "
            "'xla'."
        )
    return BACKENDS[name]
