"""Operations in C++ for CPUs, as custom calls of XLA on its own threads.

From the bottom up:

    src/kernels.h     interface between the rows and all else
    src/floats.h      floats and their bits
    src/planes.h      codes to planes and back
    src/offsets.h     rounding offsets
    src/levels.h      positions to levels and back
    src/block_rows.h  rows of formats with one width, encoded and decoded
    src/rows.cc       rows encoded and decoded: compiled once for each instruction set
    src/dispatch.h    the instruction set of this machine
    src/blocks.h      blocks of rows on threads
    src/row_writer.h  rows of a large result, around the caches
    src/sorting.h     words in order
    src/operations.h  the operations
    src/buffers.h     buffers of XLA, their shapes, and errors of calls
    src/calls.cc      the operations as custom calls
    src/block_*       the same for formats with one width
    src/copies.h      pieces of arrays that are copied to others
    src/copies.cc     the copies as a custom call
    build             how the sources are compiled
    library           how the library is loaded, or why it is not used
    backend           the operations on arrays of JAX

The package works without the library, which needs a C++ compiler where the package is built.
"""

from pallas_kernels._native.backend import Native
from pallas_kernels._native.library import instruction_set, target, why_not, why_not_here

__all__ = ["Native", "instruction_set", "target", "why_not", "why_not_here"]
