"""Cutting of flat vectors into many pieces, with few kernels to compile."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels._jax.dependencies import never


def cut(rows: Array, sizes: Iterable[int]) -> list[Array]:
    """Cut an array along its last axis into pieces of some sizes, which add up to its own.

    XLA for CPUs compiles each static slice to a kernel of its own, in some 30 ms. It compiles equal
    kernels once. So places are operands, and all pieces of one size share a kernel.
    """
    sizes = tuple(sizes)
    return [rows] if len(sizes) == 1 else _cut.bind(rows, sizes=sizes)


def _static(rows: Array, *, sizes: tuple[int, ...]) -> Sequence[Array]:
    return lax.split(rows, sizes, axis=rows.ndim - 1)


def _at_operands(rows: Array, *, sizes: tuple[int, ...]) -> Sequence[Array]:
    """Cut at places that the compiler does not know."""
    if rows.size == 0:
        return _static(rows, sizes=sizes)
    zero = never(rows).astype(np.uint32)
    others = (np.uint32(0),) * (rows.ndim - 1)
    pieces = []
    for start, size in zip(np.cumsum((0, *sizes[:-1])), sizes, strict=True):
        # The compiler cannot tell which one of the two numbers the index picks. A constant of one
        # number would become a part of the kernel.
        place = jnp.asarray(np.array([start, start + 1], np.uint32))
        place = lax.squeeze(lax.dynamic_slice(place, (zero,), (1,)), (0,))
        pieces.append(lax.dynamic_slice(rows, (*others, place), (*rows.shape[:-1], size)))
    return pieces


def _abstract(rows: Any, *, sizes: tuple[int, ...]) -> list[Any]:
    return [rows.update(shape=(*rows.shape[:-1], size)) for size in sizes]


def _transpose(cotangents: Sequence[Any], rows: Any, *, sizes: tuple[int, ...]) -> list[Any]:
    whole = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return [lax.concatenate(whole, rows.aval.ndim - 1)]


def _batch(values: Any, dimensions: Any, *, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    moved = jnp.moveaxis(values[0], dimensions[0], 0)
    return _cut.bind(moved, sizes=sizes), [0] * len(sizes)


_cut = Primitive("cut")
_cut.multiple_results = True
_cut.def_impl(jax.jit(_static, static_argnames="sizes"))
_cut.def_abstract_eval(_abstract)
ad.deflinear2(_cut, _transpose)
batching.primitive_batchers[_cut] = _batch
mlir.register_lowering(_cut, mlir.lower_fun(_static, multiple_results=True))
mlir.register_lowering(_cut, mlir.lower_fun(_at_operands, multiple_results=True), platform="cpu")
