"""The operations of the native codec on arrays of JAX.

XLA:CPU gives each of them the memory of its arguments and its result. Nothing is copied. Arguments
that a custom call reads one by one are arrays of one element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels._jax.compat import match_varying
from pallas_kernels._native.library import target
from pallas_kernels.codec.arithmetic import Index
from pallas_kernels.codec.layout import Layout
from pallas_kernels.codec.levels import GeometricLevels
from pallas_kernels.codec.ordering import LocalRows, Places
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE
from pallas_kernels.codec.rounding import Rounding

_ROUNDINGS: dict[Rounding, int] = {"nearest": 0, "correlated": 1, "independent": 2}
_GROUP_SIZES = (8, 16, 32)
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)  # of rows that the library loads


def why_not_for(layout: Layout) -> str | None:
    """Return the reason why the native codec does not take a layout; None if it does."""
    if layout.group_size not in _GROUP_SIZES:
        return f"the native codec has groups of {_GROUP_SIZES} coordinates, not {layout.group_size}"
    if isinstance(layout.quantizer.levels(2), GeometricLevels):
        # Whose bytes depend on the last bits of a logarithm.
        return "the native codec does not have the logarithm of XLA, which geometric levels take"
    return None


def statistics(rows: Array) -> Array:
    """Compute norms; see `pallas_kernels.operations.statistics`."""
    [norms] = call("statistics", [(rows.shape[:1], jnp.float32)], [loaded(rows)])
    return norms


def hop(payloads: Array, local: LocalRows, chunk: Index, turn: Index, *, layout: Layout) -> Array:
    """Encode a partial sum; see `pallas_kernels.operations.hop`."""
    [message] = call(
        "hop",
        [((layout.payload_bytes,), jnp.uint8)],
        [*_inputs(payloads, local, chunk, layout), local.seed, one(turn)],
        **_attributes(layout),
        rounding=np.int64(_ROUNDINGS[layout.quantizer.rounding]),
    )
    return message


def decompress_accumulate(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> Array:
    """Sum received rows and local ones; see `pallas_kernels.operations.decompress_accumulate`."""
    [sums] = call(
        "decompress_accumulate",
        [_rows(layout.rows_per_chunk)],
        _inputs(payloads, local, chunk, layout),
        **_attributes(layout),
    )
    return sums


def scaled_sums(
    payloads: Array, local: LocalRows, chunk: Index, *, layout: Layout
) -> tuple[Array, Array]:
    """Sum rows, and compute scales; see `pallas_kernels.operations.scaled_sums`."""
    sums, message = call(
        "scaled_sums",
        [_rows(layout.rows_per_chunk), ((layout.payload_bytes,), jnp.uint8)],
        _inputs(payloads, local, chunk, layout),
        **_attributes(layout),
    )
    return sums, message


def decompress(payloads: Array, places: Places, *, layout: Layout) -> Array:
    """Decode all chunks; see `pallas_kernels.operations.decompress`."""
    return decompress_sums(payloads, places, jnp.zeros((0, 0), jnp.int32), layout=layout)


def decompress_sums(payloads: Array, places: Places, table: Array, *, layout: Layout) -> Array:
    """Decode sums; see `pallas_kernels.operations.decompress_sums`."""
    [values] = call(
        "decompress",
        [_rows(layout.num_rows)],
        [payloads, *places, _levels(layout), table],
        **_attributes(layout),
    )
    return values


def sort(words: Array) -> Array:
    """Sort words; see `pallas_kernels.operations.sort`."""
    [words] = call("sort", [(words.shape, jnp.uint32)], [words])
    return words


def _rows(count: int) -> tuple[tuple[int, int], Any]:
    return (count, SUPER_GROUP_SIZE), jnp.float32


def _inputs(payloads: Array, local: LocalRows, chunk: Index, layout: Layout) -> list[Array]:
    """Return the operands that all operations on one chunk take first."""
    return [payloads, loaded(local.rows), *local.places, one(chunk), _levels(layout)]


def loaded(rows: Array) -> Array:
    """Return rows of a dtype that the library loads: as they are, or in float32."""
    return rows if rows.dtype in _DTYPES else rows.astype(jnp.float32)


def one(value: Index) -> Array:
    """Return the array of one number, int32 [1], that a custom call reads."""
    # By its low 32 bits, whatever its dtype.
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
    **attributes: np.int64,
) -> list[Array]:
    """Run a custom call, whose operands and results all vary over the same axes.

    Args:
      operation: its name, of `library.CALLS`.
      results: shapes and dtypes of its results.
      operands: arrays.
      **attributes: static numbers.
    """
    operands = [jnp.asarray(operand) for operand in operands]
    for operand in list(operands):
        operands = match_varying(operands, operand)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    run = jax.ffi.ffi_call(target(operation), shapes, vmap_method="sequential")
    # JAX takes the results of any custom call for values that do not vary.
    return match_varying(list(run(*operands, **attributes)), operands[0])
