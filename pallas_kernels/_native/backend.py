"""The operations of the native codec on arrays of JAX, as a backend.

XLA:CPU gives each of them the memory of its arguments and its result. Nothing is copied. Arguments
that a custom call reads one by one are arrays of one element.
"""

from collections.abc import Sequence
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
        norms = jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32)
        return call("statistics", norms, [loaded(rows)])

    @override
    def hop(
        self, payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout
    ) -> Array:
        return call(
            "hop",
            message_of(layout.payload_bytes),
            [*_inputs(payloads, local, chunk, layout), local.seed, one(turn)],
            **_attributes(layout),
            rounding=_ROUNDINGS[layout.quantizer.rounding],
        )

    @override
    def decompress_accumulate(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> Array:
        inputs, sums = _inputs(payloads, local, chunk, layout), rows_of(layout.rows_per_chunk)
        return call("decompress_accumulate", sums, inputs, **_attributes(layout))

    @override
    def scaled_sums(
        self, payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
    ) -> tuple[Array, Array]:
        results = rows_of(layout.rows_per_chunk), message_of(layout.payload_bytes)
        inputs = _inputs(payloads, local, chunk, layout)
        return call("scaled_sums", results, inputs, **_attributes(layout))

    @override
    def decompress(
        self, payloads: Array, places: Places, table: Array | None = None, *, layout: Layout
    ) -> Array:
        if table is None:
            table = jnp.zeros((0, 0), jnp.int32)
        operands = [payloads, *places, _levels(layout), table]
        return call("decompress", rows_of(layout.num_rows), operands, **_attributes(layout))

    decompress_sums = decompress

    @override
    def sort(self, words: Array, /) -> Array:
        return call("sort", jax.ShapeDtypeStruct(words.shape, jnp.uint32), [words])


def _inputs(payloads: Array, local: LocalRows, chunk: Index, layout: Layout) -> list[Array]:
    """Return the operands that all operations on one chunk take first."""
    return [payloads, loaded(local.rows), *local.places, one(chunk), _levels(layout)]


def message_of(size: int) -> jax.ShapeDtypeStruct:
    """Describe a message of some bytes."""
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def rows_of(count: int) -> jax.ShapeDtypeStruct:
    """Describe decoded rows."""
    return jax.ShapeDtypeStruct((count, SUPER_GROUP_SIZE), jnp.float32)


def loaded(rows: Array) -> Array:
    """Return rows of a dtype that the library loads: as they are, or in float32."""
    return rows if rows.dtype in _DTYPES else rows.astype(jnp.float32)


def one(value: Index) -> Array:
    """Return the low 32 bits of a number of any dtype as a custom call reads them: int32 [1]."""
    return jnp.asarray(value).astype(jnp.int32).reshape(1)


def _levels(layout: Layout) -> Array:
    return jnp.asarray(layout.quantizer.level_table()[0])


def _attributes(layout: Layout) -> dict[str, int]:
    return {"units": layout.units, "group_size": layout.group_size}


def call(
    operation: str,
    results: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    operands: list[Array],
    **attributes: int | np.float32,
) -> Any:
    """Run a custom call of `library.CALLS`, whose operands and results vary over the same axes.

    The attributes are static numbers; integers have 64 bits. It returns what `results` describes:
    an array, or several.
    """
    operands = [jnp.asarray(operand) for operand in operands]
    operands = match_varying(operands, *operands)
    run = jax.ffi.ffi_call(library.target(operation), results, vmap_method="sequential")
    # JAX takes the results of any custom call for values that do not vary.
    return match_varying(run(*operands, **attributes), operands[0])
