"""Memory of this process that malloc keeps between the calls of a program on CPU devices."""

import ctypes
from collections.abc import Callable
from typing import Any

# Parameters of `mallopt`, in malloc.h of glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_PARAMETERS = {
    _MMAP_MAX: 0,  # no buffer is mapped by itself, and unmapped when it is freed
    _TRIM_THRESHOLD: -1,  # what is free at the end of the heap stays
    _ARENA_MAX: 1,  # one heap for all threads: those of further threads end at 64 MiB
}
_kept = False


def keep_memory() -> bool:
    """Let malloc keep the memory of freed buffers, for the next call of a program on CPU devices.

    XLA allocates the results and the temporary arrays of each call anew. glibc takes those of 32
    MiB and more from the system, and gives them back after their use. The first write to each of
    their pages then costs as much as several copies of it. After this function, freed memory stays
    with the process: it needs as much as it needed at its peak, and the next call finds it.

    Call it at the start of a program, before the first array of JAX, in each process. Nothing else
    of this library changes how memory is allocated. It has no effect on arrays of GPUs and TPUs,
    nor where another malloc is loaded before that of glibc.

    Returns:
      True if memory is kept. False where the C library is not glibc, as on macOS and Alpine Linux,
      and nothing is changed.

    >>> keep_memory() in (True, False)
    True
    """
    global _kept
    if set_parameter := _mallopt():
        _kept = all(set_parameter(name, value) == 1 for name, value in _PARAMETERS.items())
    return _kept


def memory_is_kept() -> bool:
    """Return whether `keep_memory` changed this process."""
    return _kept


def _mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc that sets parameters; None for other C libraries."""
    try:
        library: Any = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  others have other parameters, if any
        return library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
