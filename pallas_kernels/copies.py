"""Copies of segments of some arrays to others, in one operation.

A tree of thousands of leaves is cut into vectors and joined again. As slices and concatenations,
these are several operations for each leaf, and XLA takes milliseconds to compile each of them. On
CPUs, all of them are one custom call of the native library, wherever a program may hold one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels import _native
from pallas_kernels._jax import compat
from pallas_kernels.segments import Segment, Table
from pallas_kernels.slices import slices


def copy(sources: Sequence[Array], table: Table, *, fusible: bool = False) -> list[Array]:
    """Copy segments of some arrays to others.

    Args:
      sources: at least one array [rows, columns], all of the same rows and dtype.
      table: what is copied where.
      fusible: whether each piece is an operation that XLA may fuse with others, on CPUs too.

    Returns:
      One array [rows, columns] for each number of columns in `table.results`.
    """
    if not table.results:
        return []
    alike: list[Array] = list(sources)  # varying over the same axes
    for one in {compat.varying_axes(source): source for source in sources}.values():
        alike = compat.match_varying(alike, one)
    return _copy.bind(*alike, table=table, fusible=fusible)


def pad(values: Array, size: int) -> Array:
    """Pad a vector with zeros at its end.

    XLA for CPUs computes each padded coordinate, which takes three times as long as a copy.

    Args:
      values: vector [at most size].
      size: coordinates of the result.

    Raises:
      ValueError: the size is less than that of the vector.
    """
    if size < values.size:
        raise ValueError(
            f"size={size} is less than the {values.size} coordinates of "
            f"{values.dtype}{list(values.shape)}. Give at least as many."
        )
    if values.size == size:
        return values
    table = Table((Segment(0, 0, 0, 0, values.size),), (values.size,), (size,))
    [padded] = copy([values.reshape(1, -1)], table)
    return padded.reshape(-1)


def _abstract(*sources: Any, table: Table, fusible: bool) -> list[Any]:
    if len(sources) != len(table.sources) or not sources:
        raise ValueError(
            f"There are {len(sources)} sources, and the table is of {len(table.sources)}. Give as "
            "many, and at least one."
        )
    first = sources[0]
    for number, (source, columns) in enumerate(zip(sources, table.sources, strict=True)):
        if source.ndim != 2 or source.shape[1] != columns:
            raise ValueError(
                f"Source {number} is {source.str_short()}. The table is of one with 2 dimensions "
                f"and {columns} columns."
            )
        if (source.shape[0], source.dtype) != (first.shape[0], first.dtype):
            raise ValueError(
                f"Source {number} is {source.str_short()}, and source 0 is {first.str_short()}. "
                "All of them have to have the same rows and dtype."
            )
    return [first.update(shape=(first.shape[0], n), weak_type=False) for n in table.results]


def _transpose(cotangents: Sequence[Any], *sources: Any, table: Table, fusible: bool) -> list[Any]:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    back = copy(given, table.reversed, fusible=fusible) if given else []
    return [c if ad.is_undefined_primal(s) else None for s, c in zip(sources, back, strict=True)]


def _batch(
    values: Sequence[Any], dimensions: Sequence[Any], *, table: Table, fusible: bool
) -> tuple[list[Array], list[int]]:
    size = next(v.shape[d] for v, d in zip(values, dimensions, strict=True) if d is not None)
    stacked = [
        jnp.broadcast_to(value, (size, *value.shape)) if d is None else jnp.moveaxis(value, d, 0)
        for value, d in zip(values, dimensions, strict=True)
    ]
    rows = stacked[0].shape[1]
    results = copy([s.reshape(size * rows, s.shape[2]) for s in stacked], table, fusible=fusible)
    return [r.reshape(size, rows, r.shape[1]) for r in results], [0] * len(results)


def _run(*sources: Array, **static: Any) -> list[Array]:
    with jax.disable_jit(False):  # a jitted function would come back to here without an end
        return _jitted(*sources, **static)


def _lower_for_cpus(context: Any, *values: Any, table: Table, fusible: bool) -> Sequence[Any]:
    has_bytes = jax.dtypes.itemsize_bits(context.avals_in[0].dtype) >= 8
    in_one = has_bytes and not fusible
    if in_one and compat.may_hold_custom_calls(context) and _native.why_not_here() is None:
        return _native.lower_copies(context, *values, table=np.array(table.segments, np.int64))
    return _by_shared_kernels(context, *values, table=table, fusible=fusible)


_copy = Primitive("copy_pieces")
_copy.multiple_results = True
_jitted = jax.jit(_copy.bind, static_argnames=("table", "fusible"))
_copy.def_impl(_run)
_copy.def_abstract_eval(_abstract)
ad.deflinear2(_copy, _transpose)
batching.primitive_batchers[_copy] = _batch
_by_slices, _by_shared_kernels = (
    mlir.lower_fun(
        lambda *sources, table, fusible, shared=shared: slices(
            sources, table, share_kernels=shared
        ),
        multiple_results=True,
    )
    for shared in (False, True)
)
mlir.register_lowering(_copy, _by_slices)
mlir.register_lowering(_copy, _lower_for_cpus, platform="cpu")
