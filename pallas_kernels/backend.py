"""Interface of a backend: operations on whole messages, and the places where it can run them.

A backend has four operations of its own. Five others are made of these or of XLA, and a backend
overrides those that it can run faster. `pallas_kernels.registry` lists the backends, and
`pallas_kernels.choice` takes one of them for an operation.

Operations take the local array as it lies in memory, the table of places and the index of the
chunk, so that a fused kernel gathers, decodes, adds, encodes and packs in one pass:

    payloads        messages that arrived, [received, length] of one chunk (one in a ring), or
                    [num_chunks, length] of all of them
    local           rows of the bucket, their places and the seed
    chunk, turn     index of the chunk, and number of this compression of it: see section 4 of
                    docs/wire_format.md
    places          places of all rows
    layout          static layout of a message

A message is an array of bytes, uint8 [payload_bytes], or of words, uint32 [payload_bytes / 4].
Every operation takes both, and a `hop` writes the type that it receives.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.codec import Index, Layout, LocalRows, Places, scales
from pallas_kernels.codec.ordering import sort_words

Operation = Callable[..., Any]  # a method of `Backend`, such as `Backend.hop`


class Backend(abc.ABC):
    """Operations on whole messages by one kind of programs.

    Every backend returns the bytes of the base, `pallas_kernels.registry.BASE`, and the norms of
    the base but for the order of additions, which differs only where `rounds_as_base` is False.
    Its methods get and return messages of `message_dtype`; `run` takes any.
    """

    name: ClassVar[str]  # that users give as `implementation`
    platform: ClassVar[str]  # "cpu", "cuda" or "tpu", as in `jax.lax.platform_dependent`
    message_dtype: ClassVar[DTypeLike] = jnp.uint8  # uint32 for words
    rounds_as_base: ClassVar[bool] = False  # to the last bit of a decoded value, wherever it runs

    @abc.abstractmethod
    def why_not_here(self) -> str | None:
        """Return the reason why this machine cannot run the backend; None if it can.

        Law: the same within a process, and of no program.
        """

    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        """Return the reason why the backend cannot run an operation; None if it can.

        Such an operation is left to the base, for the widths, spacings, shapes or dtypes that a
        backend has no code for. Of the arrays only shapes and dtypes may be read, and chunks and
        turns may be numbers.
        """
        return None

    def needs_check(self) -> bool:
        """Return whether `pallas_kernels.first_use` has to check the backend before its use."""
        return True

    def details(self) -> str:
        """Return a few words about its programs on this machine, for reports; may be empty."""
        return ""

    # Operations of its own.

    @abc.abstractmethod
    def statistics(self, rows: Array, /) -> Array:
        """Compute the L2 norm of every row, [rows, 256] of a floating dtype: float32 [rows].

        The norm of a row that holds NaN or Inf is not finite.
        """

    @abc.abstractmethod
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        """Decode received partial sums of a chunk, add the local rows in float32, and encode the
        sum. There may be no received message, [0, length].
        """

    @abc.abstractmethod
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        """Decode received messages of a chunk and add the local rows in float32.

        Returns:
          The sum that `hop` encodes, float32 [rows_per_chunk, 256], in the order of the message.
        """

    @abc.abstractmethod
    def decompress(self, payloads: Array, places: Places, *, layout: Layout) -> Array:
        """Decode the messages of all chunks: float32 [num_rows, 256], in their original order."""

    # Operations made of these, for sections 1 and 7 of docs/wire_format.md.

    def solve(self, energies: Array, *, layout: Layout) -> Array:
        """Solve for the widths of the rows of chunks; see `codec.Allocation.solve`.

        Energies are logarithms, int32 [chunks, rows_per_chunk], largest first.

        Returns:
          The number of rows whose codes have bit 0, 1, ..., int32 [chunks, 16].
        """
        return layout.solve(energies)

    def sort(self, words: Array, /) -> Array:
        """Sort words that all differ, uint32 [..., count], along the last axis, ascending."""
        return sort_words(words)

    def energies(self, payloads: Array, *, layout: Layout) -> Array:
        """Compute energies of rows from the scales of messages: int32 [count, rows_per_chunk].

        They are logarithms; see `codec.scales.row_energies`.
        """
        return scales.row_energies(*layout.scales(payloads)).astype(jnp.int32)

    def scaled_sums(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> tuple[Array, Array]:
        """Compute `decompress_accumulate`, and a message that has the scales of the sums alone."""
        rows = self.decompress_accumulate(payloads, local, chunk, layout=layout)
        of_rows = scales.quantize_scales(scales.group_maxima(rows, layout.group_size))
        return rows, layout.with_scales(jnp.zeros_like(payloads[0]), *of_rows)

    def decompress_sums(
        self, payloads: Array, places: Places, table: Array, *, layout: Layout
    ) -> Array:
        """Compute `decompress` of messages whose scales are in the order of another table.

        The table has the place of the scales of the row at each place, int32 [num_chunks,
        rows_per_chunk].
        """
        group_bytes, super_bits = layout.scales(payloads)
        ordered = (
            places,
            jnp.take_along_axis(group_bytes, table[..., None], axis=1),
            jnp.take_along_axis(super_bits, table, axis=1),
        )
        # Fused into the decoding of every block, the gathers take twice its time on XLA:CPU.
        places, *of_rows = lax.optimization_barrier(ordered)
        return self.decompress(layout.with_scales(payloads, *of_rows), places, layout=layout)

    # Uses of any operation.

    def derives(self, operation: Operation) -> bool:
        """Return whether this backend has no operation of its own, and makes it of others."""
        return getattr(type(self), operation.__name__) is operation

    def run(self, operation: Operation, *arrays: Any, **static: Any) -> Any:
        """Run an operation on messages of any type; those that it returns have the same type."""
        function = getattr(self, operation.__name__)
        if not takes_messages(operation) or arrays[0].dtype == self.message_dtype:
            return function(*arrays, **static)
        payloads, *others = arrays
        results = function(payloads.view(self.message_dtype), *others, **static)

        def converted(result: Array) -> Array:
            return result.view(payloads.dtype) if result.dtype == self.message_dtype else result

        return jax.tree.map(converted, results)


def takes_messages(operation: Operation) -> bool:
    """Return whether the first argument of an operation are messages."""
    return operation not in (Backend.statistics, Backend.sort, Backend.solve)
