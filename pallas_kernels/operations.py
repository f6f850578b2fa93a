"""The operations of the codec on whole messages, each run by one of several backends.

Operations take the local array as it lies in memory, the table of places and the index of the
chunk, so that a fused kernel gathers, decodes, adds, encodes and packs in one pass:

    payloads        messages that arrived, [received, length] of one chunk (one in a ring), or
                    [num_chunks, length] of all of them
    local           rows of the bucket, their places and the seed
    chunk, turn     index of the chunk, and number of this compression of it: see section 4 of
                    docs/wire_format.md
    places          places of all rows
    layout          static layout of a message
    implementation  name of a backend, or None for the fastest one: see `pallas_kernels.choice.run`

A message is an array of bytes, uint8 [payload_bytes], or of words, uint32 [payload_bytes / 4].
Every operation takes both. A `hop` writes the type that it receives, and `compress` starts with the
type that suits the backend.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import choice, first_use
from pallas_kernels.backend import Backend
from pallas_kernels.codec import Index, Layout, LocalRows, Places


def statistics(rows: Array, *, implementation: str | None = None) -> Array:
    """Compute the L2 norm of every row, [rows, 256] of a floating dtype: float32 [rows].

    The norm of a row that holds NaN or Inf is not finite.
    """
    return choice.run(implementation, Backend.statistics, rows)


def compress(
    local: LocalRows,
    chunk: Index,
    turn: Index,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Encode one chunk of the local rows: the first message on its path."""
    dtype = choice.message_dtype(implementation)
    nothing = jnp.zeros((0, layout.payload_bytes // jnp.dtype(dtype).itemsize), dtype)
    return hop(nothing, local, chunk, turn, layout=layout, implementation=implementation)


def hop(
    payloads: Array,
    local: LocalRows,
    chunk: Index,
    turn: Index,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Decode received partial sums of a chunk, add the local rows in float32, and encode the sum.

    Without a received message, [0, length], it is `compress`.
    """
    return choice.run(implementation, Backend.hop, payloads, local, chunk, turn, layout=layout)


def decompress_accumulate(
    payloads: Array,
    local: LocalRows,
    chunk: Index,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Decode received messages of a chunk and add the local rows in float32.

    Returns:
      The sum that `hop` encodes, float32 [rows_per_chunk, 256], rows in the order of the message.
    """
    return choice.run(
        implementation, Backend.decompress_accumulate, payloads, local, chunk, layout=layout
    )


def decompress(
    payloads: Array, places: Places, *, layout: Layout, implementation: str | None = None
) -> Array:
    """Decode the messages of all chunks: float32 [num_rows, 256], rows in their original order."""
    return choice.run(implementation, Backend.decompress, payloads, places, layout=layout)


def sort(words: Array, *, implementation: str | None = None) -> Array:
    """Sort words that all differ, uint32 [..., count], along the last axis, in ascending order."""
    return choice.run(implementation, Backend.sort, words)


def solve(energies: Array, *, layout: Layout, implementation: str | None = None) -> Array:
    """Solve for the widths of the rows of chunks; see `codec.Allocation.solve`.

    Energies are logarithms, int32 [chunks, rows_per_chunk], largest first.

    Returns:
      The number of rows whose codes have bit 0, 1, ..., int32 [chunks, 16].
    """
    return choice.run(implementation, Backend.solve, energies, layout=layout)


def scaled_sums(
    payloads: Array,
    local: LocalRows,
    chunk: Index,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """Compute `decompress_accumulate`, and a message that has the scales of the sums alone."""
    return choice.run(implementation, Backend.scaled_sums, payloads, local, chunk, layout=layout)


def energies(payloads: Array, *, layout: Layout, implementation: str | None = None) -> Array:
    """Compute energies of rows from the scales of their messages: int32 [count, rows_per_chunk].

    They are logarithms; see `codec.scales.row_energies`.
    """
    return choice.run(implementation, Backend.energies, payloads, layout=layout)


def decompress_sums(
    payloads: Array,
    places: Places,
    table: Array,
    *,
    layout: Layout,
    implementation: str | None = None,
) -> Array:
    """Compute `decompress` of messages whose scales are in the order of another table.

    The table has the place of the scales of the row at each place, int32 [num_chunks,
    rows_per_chunk].
    """
    return choice.run(
        implementation, Backend.decompress_sums, payloads, places, table, layout=layout
    )


def refused_backends() -> tuple[str, ...]:
    """Return the backends that this process refuses, after the check of the default one."""
    choice.default()  # any choice of it checks it
    return first_use.refused()


def default_backend() -> str:
    """Describe the backend that runs programs here, in one line; see `choice.default`."""
    return choice.default()
