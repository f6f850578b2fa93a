"""Interface of a backend: operations on whole messages, and the places where it can run them.

A backend has four operations of its own. Five others are made of these or of XLA, and a backend
overrides those that it can run faster. `pallas_kernels.registry` lists the backends, and
`pallas_kernels.choice` takes one of them for an operation.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels import message_types
from pallas_kernels.codec import scales
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.ordering import LocalRows, Places, sort_words

Operation = Callable[..., Any]  # a method of `Backend`, such as `Backend.hop`


class Backend(abc.ABC):
    """Operations on whole messages by one kind of programs.

    Every backend returns the bytes of the base, `pallas_kernels.registry.BASE`. Messages are arrays
    of `message_dtype`. `pallas_kernels.operations` describes all arguments and results.
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
        backend has no code for.

        Args:
          operation: the operation, such as `Backend.hop`.
          *arrays: its arguments, of which only shapes and dtypes may be read. Chunks and turns may
            be numbers.
          layout: static layout of a message; None for `statistics`.
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
        """Compute norms; see `pallas_kernels.operations.statistics`.

        Law: those of the base, but for the order of additions where `rounds_as_base` is False.
        """

    @abc.abstractmethod
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        """Encode a partial sum; see `pallas_kernels.operations.hop`.

        Without a received message, uint8 [0, length], it is the first one of the local rows.

        Law: the bytes of the base.
        """

    @abc.abstractmethod
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        """Sum rows; see `pallas_kernels.operations.decompress_accumulate`.

        Law: the values that `hop` encodes.
        """

    @abc.abstractmethod
    def decompress(self, payloads: Array, places: Places, *, layout: Layout) -> Array:
        """Decode all chunks; see `pallas_kernels.operations.decompress`.

        Law: of the messages of local rows it is those rows, rounded.
        """

    # Operations made of these, for sections 1 and 7 of docs/wire_format.md.

    def solve(self, energies: Array, *, layout: Layout) -> Array:
        """Solve for widths; see `pallas_kernels.operations.solve`."""
        return layout.solve(energies)

    def sort(self, words: Array, /) -> Array:
        """Sort words; see `pallas_kernels.operations.sort`."""
        return sort_words(words)

    def energies(self, payloads: Array, *, layout: Layout) -> Array:
        """Compute energies of rows; see `pallas_kernels.operations.energies`."""
        return scales.row_energies(*layout.scales(payloads)).astype(jnp.int32)

    def scaled_sums(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> tuple[Array, Array]:
        """Sum rows, and compute scales; see `pallas_kernels.operations.scaled_sums`."""
        rows = self.decompress_accumulate(payloads, local, chunk, layout=layout)
        of_rows = scales.quantize_scales(scales.group_maxima(rows, layout.group_size))
        return rows, layout.with_scales(jnp.zeros_like(payloads[0]), *of_rows)

    def decompress_sums(
        self, payloads: Array, places: Places, table: Array, *, layout: Layout
    ) -> Array:
        """Decode sums; see `pallas_kernels.operations.decompress_sums`."""
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
        """Return whether an operation is made of the others: this class makes it, not the backend.

        Args:
          operation: the operation, such as `Backend.solve`.
        """
        return getattr(type(self), operation.__name__) is operation

    def run(self, operation: Operation, *arrays: Any, **static: Any) -> Any:
        """Run an operation on messages of any type.

        Args:
          operation: the operation, such as `Backend.hop`.
          *arrays: its arguments. A message that it returns has the type of those that it receives.
          **static: its layout, if it takes one.
        """
        function = getattr(self, operation.__name__)
        if takes_messages(operation):
            function = message_types.adapt(function, arrays[0].dtype, self.message_dtype)
        return function(*arrays, **static)


def takes_messages(operation: Operation) -> bool:
    """Return whether the first argument of an operation are messages."""
    return operation not in (Backend.statistics, Backend.sort, Backend.solve)


def takes_layout(operation: Operation) -> bool:
    """Return whether an operation takes the layout of a message."""
    return operation not in (Backend.statistics, Backend.sort)
