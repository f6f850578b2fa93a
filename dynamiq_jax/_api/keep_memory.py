"""Memory of this process that malloc keeps between the calls of a program on CPU devices."""

import ctypes
from typing import Any

# Parameters of `mallopt`, in malloc.h of glibc.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_PARAMETERS = {
    _MMAP_MAX: 0,  # no buffer is mapped by itself, and unmapped when it is freed
    _TRIM_THRESHOLD: -1,  # what is free at the end of the heap stays
    _ARENA_MAX: 1,  # one heap for all threads: further ones map what is larger than 64 MiB
}
_kept = False


def keep_memory() -> bool:
    """Let malloc keep the memory of freed buffers, for the next call of a program on CPU devices.

    XLA allocates the results and the temporary arrays of each call anew. glibc takes those of 32
    MiB and more from the system, and gives them back after their use. The first write to each of
    their pages then costs as much as several copies of it. After this function, freed memory stays
    with the process: it needs as much as it needed at its peak. The first ten calls or so still
    take new pages, until free pieces of the right sizes are there.

    Call it at the start of a program, before the first array of JAX, in each process. Nothing else
    of this library changes how memory is allocated. It has no effect on arrays of GPUs and TPUs,
    nor where another malloc is loaded before that of glibc.

    Returns:
      True if memory is kept. False if nothing was changed: the C library is not glibc, as on macOS
      and Alpine Linux, or threads of this process have heaps of their own already, which no later
      setting takes away. In the second case, call this function earlier.

    >>> keep_memory() in (True, False)
    True
    """
    global _kept
    if not _kept and (library := _glibc()) and _number_of_heaps(library) == 1:
        _kept = all(library.mallopt(name, value) == 1 for name, value in _PARAMETERS.items())
    return _kept


def memory_is_kept() -> bool:
    """Return whether `keep_memory` changed this process."""
    return _kept


def _glibc() -> Any:
    """Return the C library of this process if it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  others have other parameters, if any
        library.mallopt  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return None
    return library


def _number_of_heaps(library: Any) -> int:
    """Return how many heaps glibc's malloc has made, from the XML that it writes about itself."""
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    library.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(library.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    library.malloc_info(0, stream)
    library.fclose(stream)
    heaps = (text.value or b"").count(b"<heap nr=")
    library.free(text)
    return heaps
