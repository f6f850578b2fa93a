"""The operations of the native codec on arrays of JAX, as a backend.

XLA:CPU gives each of them the memory of its arguments and its result. Nothing is copied. Arguments
that a custom call reads one by one are arrays of one element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels._jax.compat import match_varying, override
from pallas_kernels._native import library
from pallas_kernels.backend import Backend, Operation
from pallas_kernels.codec import SUPER_GROUP_SIZE, Index, Layout, LocalRows, Places
from pallas_kernels.codec.levels import GeometricLevels
from pallas_kernels.codec.rounding import Rounding

_ROUNDINGS: dict[Rounding, int] = {"nearest": 0, "correlated": 1, "independent": 2}
_GROUP_SIZES = (8, 16, 32)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)  # of rows that the library loads


class Native(Backend):
    """C++ for CPUs, on all threads of XLA."""

    name = "native"
    platform = "cpu"
    rounds_as_base = True

    @override
    def why_not_here(self) -> str | None:
        return library.why_not_here() or library.why_not_fused()

    @override
    def why_not_for(
        self, operation: Operation, *arrays: Any, layout: Layout | None = None
    ) -> str | None:
        if layout is None:
            return None
        if layout.group_size not in _GROUP_SIZES:
            return (
                f"the native codec has groups of {_GROUP_SIZES} coordinates, not "
                f"{layout.group_size}"
            )
        if isinstance(layout.quantizer.levels(2), GeometricLevels):
            # Whose bytes depend on the last bits of a logarithm.
            return (
                "the native codec does not have the logarithm of XLA, which geometric levels take"
            )
        return None

    @override
    def details(self) -> str:
        return f"C++ with {library.instruction_set()}"

    @override
    def statistics(self, rows: Array, /) -> Array:
        [norms] = call("statistics", [(rows.shape[:1], jnp.float32)], [loaded(rows)])
        return norms

    @override
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        [message] = call(
            "hop",
            [((layout.payload_bytes,), jnp.uint8)],
            [*_inputs(payloads, local, chunk, layout), local.seed, one(turn)],
            **_attributes(layout),
            rounding=np.int64(_ROUNDINGS[layout.quantizer.rounding]),
        )
        return message

    @override
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        inputs, results = _inputs(payloads, local, chunk, layout), [_rows(layout.rows_per_chunk)]
        [sums] = call("decompress_accumulate", results, inputs, **_attributes(layout))
        return sums

    @override
    def scaled_sums(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> tuple[Array, Array]:
        results = [_rows(layout.rows_per_chunk), ((layout.payload_bytes,), jnp.uint8)]
        inputs = _inputs(payloads, local, chunk, layout)
        sums, message = call("scaled_sums", results, inputs, **_attributes(layout))
        return sums, message

    @override
    def decompress(self, payloads: Array, places: Places, *, layout: Layout) -> Array:
        return _decoded(payloads, places, jnp.zeros((0, 0), jnp.int32), layout)

    @override
    def decompress_sums(
        self, payloads: Array, places: Places, table: Array, *, layout: Layout
    ) -> Array:
        return _decoded(payloads, places, table, layout)

    @override
    def sort(self, words: Array, /) -> Array:
        [words] = call("sort", [(words.shape, jnp.uint32)], [words])
        return words


def _decoded(payloads: Array, places: Places, table: Array, layout: Layout) -> Array:
    operands = [payloads, *places, _levels(layout), table]
    [values] = call("decompress", [_rows(layout.num_rows)], operands, **_attributes(layout))
    return values


def _rows(count: int) -> tuple[tuple[int, ...], Any]:
    return (count, SUPER_GROUP_SIZE), jnp.float32


def _inputs(payloads: Array, local: LocalRows, chunk: Index, layout: Layout) -> list[Array]:
    """Return the operands that all operations on one chunk take first."""
    return [payloads, loaded(local.rows), *local.places, one(chunk), _levels(layout)]


def loaded(rows: Array) -> Array:
    """Return rows of a dtype that the library loads: as they are, or in float32."""
    return rows if rows.dtype in _DTYPES else rows.astype(jnp.float32)


def one(value: Index) -> Array:
    """Return the low 32 bits of a number of any dtype as a custom call reads them: int32 [1]."""
    return jnp.asarray(value).astype(jnp.int32).reshape(1)


def _levels(layout: Layout) -> Array:
    numbers, _ = layout.quantizer.level_table()
    return jnp.asarray(numbers)


def _attributes(layout: Layout) -> dict[str, np.int64]:
    return {"units": np.int64(layout.units), "group_size": np.int64(layout.group_size)}


def call(
    operation: str,
    results: list[tuple[tuple[int, ...], Any]],
    operands: list[Array],
    **attributes: np.int64 | np.float32,
) -> list[Array]:
    """Run a custom call of `library.CALLS`, whose operands and results vary over the same axes.

    `results` are shapes and dtypes, and `attributes` static numbers.
    """
    operands = [jnp.asarray(operand) for operand in operands]
    for operand in list(operands):
        operands = match_varying(operands, operand)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    run = jax.ffi.ffi_call(library.target(operation), shapes, vmap_method="sequential")
    # JAX takes the results of any custom call for values that do not vary.
    return match_varying(list(run(*operands, **attributes)), operands[0])
