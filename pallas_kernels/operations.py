"""The operations of the codec on whole messages, each run by one of several backends.

Operations take the local array as it lies in memory, the table of places and the index of the
chunk, so that a fused kernel gathers, decodes, adds, encodes and packs in one pass.

A message is an array of bytes, uint8 [payload_bytes], or of words, uint32 [payload_bytes / 4].
Every operation takes both. A `hop` writes the type that it receives, and `compress` starts with the
type that suits the backend.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import choice, first_use, message_types
from pallas_kernels.backend import Backend
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.ordering import LocalRows, Places


def statistics(rows: Array, *, implementation: str | None = None) -> Array:
    """Compute the L2 norm of every row.

    Args:
      rows: [rows, 256], of a floating dtype.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      float32 [rows]; the norm of a row that holds NaN or Inf is not finite.
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
    """Encode one chunk of the local rows.

    Args:
      local: rows of the bucket, their places and the seed.
      chunk: index of the chunk.
      turn: number of this compression of the chunk, see section 4 of docs/wire_format.md.
      layout: static layout of the message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      The message.
    """
    dtype = choice.message_dtype(implementation)
    nothing = jnp.zeros((0, message_types.length(layout.payload_bytes, dtype)), dtype)
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
    """Decode received messages of a chunk, add the local rows in float32, and encode the sum.

    Args:
      payloads: received partial sums, [received, length]; one in a ring.
      local: rows of the bucket, their places and the seed.
      chunk: index of the chunk that the messages are of.
      turn: number of this compression of the chunk, see section 4 of docs/wire_format.md.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      The message of the new partial sum.
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

    Args:
      payloads: received partial sums, [received, length].
      local: rows of the bucket and their places.
      chunk: index of the chunk that the messages are of.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      The sum, float32 [rows_per_chunk, 256], rows in the order of the message.
    """
    return choice.run(
        implementation, Backend.decompress_accumulate, payloads, local, chunk, layout=layout
    )


def decompress(
    payloads: Array, places: Places, *, layout: Layout, implementation: str | None = None
) -> Array:
    """Decode the messages of all chunks, with rows back in their original order.

    Args:
      payloads: messages [num_chunks, length].
      places: places of all rows.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      float32 [num_rows, 256].
    """
    return choice.run(implementation, Backend.decompress, payloads, places, layout=layout)


def sort(words: Array, *, implementation: str | None = None) -> Array:
    """Sort words that all differ, along the last axis.

    Args:
      words: uint32 [..., count].
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      The words in ascending order, of the same shape.
    """
    return choice.run(implementation, Backend.sort, words)


def solve(energies: Array, *, layout: Layout, implementation: str | None = None) -> Array:
    """Solve for the widths of the rows of chunks.

    Args:
      energies: logarithms of the energies of rows, int32 [chunks, rows_per_chunk], largest first;
        see `codec.Allocation.solve`.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

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
    """Compute `decompress_accumulate`, and the scales of the sums.

    Args:
      payloads: received partial sums, [received, length].
      local: rows of the bucket and their places.
      chunk: index of the chunk that the messages are of.
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      The sum, float32 [rows_per_chunk, 256], and a message that holds its scales, but no codes.
    """
    return choice.run(implementation, Backend.scaled_sums, payloads, local, chunk, layout=layout)


def energies(payloads: Array, *, layout: Layout, implementation: str | None = None) -> Array:
    """Compute the energies of the rows of messages, from their scales.

    Args:
      payloads: messages [count, length].
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      Logarithms, int32 [count, rows_per_chunk]; see `codec.scales.row_energies`.
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
    """Decode messages like `decompress`, whose scales are in the order of another table.

    Args:
      payloads: messages [num_chunks, length].
      places: places of all rows.
      table: where a message has the scales of the row of each place, int32 [num_chunks,
        rows_per_chunk].
      layout: static layout of a message.
      implementation: backend, see `pallas_kernels.choice.run`.

    Returns:
      float32 [num_rows, 256].
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
