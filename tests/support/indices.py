"""Indices of a traced program: those that 32 bits cannot count."""

from collections.abc import Iterator
from typing import Any

import numpy as np

_LARGEST = np.iinfo(np.int32).max


def too_large(jaxpr: Any) -> list[str]:
    """Return the operations of a jaxpr that index or count more than an int32 can, with shapes."""
    return sorted({found for equation in _equations(jaxpr) for found in _faults(equation)})


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Walk through a jaxpr, and those of its loops, branches and calls."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        values = list(equation.params.values())
        while values:
            value = values.pop()
            if isinstance(value, tuple | list):
                values += value
            elif hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from _equations(value)


def _faults(equation: Any) -> Iterator[str]:
    name, params = equation.primitive.name, equation.params
    shape = equation.invars[0].aval.shape if equation.invars else ()
    indexed = []
    if name == "dynamic_slice":
        indexed = [
            size for size, taken in zip(shape, params["slice_sizes"], strict=True) if taken < size
        ]
    elif name == "dynamic_update_slice":
        taken = equation.invars[1].aval.shape
        indexed = [size for size, part in zip(shape, taken, strict=True) if part < size]
    elif name == "gather":
        dims = params["dimension_numbers"].start_index_map
        indexed = [shape[dim] for dim in dims if params["slice_sizes"][dim] < shape[dim]]
    elif name.startswith("scatter"):
        indexed = [shape[d] for d in params["dimension_numbers"].scatter_dims_to_operand_dims]
    elif name == "iota" and params["dtype"] == np.int32:
        indexed = [params["shape"][params["dimension"]]]
    elif name == "cumsum" and equation.outvars[0].aval.dtype == np.int32:
        indexed = [shape[params["axis"]]]
    if any(size > _LARGEST for size in indexed):
        yield f"{name} in {shape}"
