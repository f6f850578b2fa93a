"""Kinds of values, and which kind an equation makes of its operands: rules of each primitive."""

import enum
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamiq_jax._rewriting.sums import as_written, axes_of, is_over_rows, over_axes
from pallas_kernels._jax.equations import Equation


class Kind(enum.IntEnum):
    """Kind of a value."""

    CONSTANT = 0  # numbers, masks and noise: of no floating argument
    STATE = 1  # arguments that no forward pass reads, as accumulated gradients; and sums of them
    GRADIENT = 2
    FORWARD = 3  # of a forward pass
    OTHER = 4  # parameters, and all else that no backward pass has made
    MIXED = 5  # made of gradients and none itself, as a product of two or a changed parameter


class SumResult(NamedTuple):
    """Result of a sum over axes."""

    path: tuple[Hashable, ...]  # of its equation
    axes: frozenset[str]
    is_same: bool  # on all workers, by its type
    size: Any  # elements


class Origin(NamedTuple):
    """Origin of a value."""

    kind: Kind
    number: float | None = None  # that all elements are, if it is known
    alike: frozenset[int] = frozenset()  # dimensions along which all elements are the same number
    # Arguments, by number, on which it depends without a pass of a differentiation in between, and
    # those of which it is another form, a multiple, or a sum. The same of sums.
    depends: frozenset[int] = frozenset()
    arguments: frozenset[int] = frozenset()
    sums: frozenset[SumResult] = frozenset()


# Equations whose result has the numbers of their operand.
_LIKE = {
    *("broadcast_in_dim", "convert_element_type", "copy", "pcast", "pvary", "reshape", "squeeze"),
    "stop_gradient",
}
# Equations whose results are of the kind of their operands: in another form or place, rounded,
# clipped, or added.
_KEEPING = _LIKE | {
    *("add", "add_any", "all_gather", "all_gather_invariant", "all_to_all", "and"),
    *("bitcast_convert_type", "ceil", "clamp", "complex", "concatenate", "conj", "cumsum"),
    *("device_put", "dynamic_slice", "dynamic_update_slice", "fft", "floor", "gather", "imag"),
    *("layout_constraint", "max", "min", "name", "neg", "optimization_barrier", "or", "pad"),
    *("pbroadcast", "ppermute", "preduced", "psum", "psum_invariant", "real", "reduce_precision"),
    *("reduce_scatter", "reduce_sum", "reduce_window_sum", "reduced_vary_cast"),
    *("reduced_vary_cast_p", "relayout", "reshard", "rev", "round", "scatter", "scatter-add"),
    *("scatter-sub", "select_n", "sharding_constraint", "shift_left", "shift_right_logical"),
    *("slice", "split", "stack", "sub", "tile", "transpose", "unreduced_psum"),
    *("unreduced_reduce_scatter", "unstack", "vary_unreduced_cast", "vary_unreduced_cast_p"),
    *("with_memory_space_constraint", "xor"),
}
# Numbers among their operands are bounds.
_BOUNDING = {"clamp", "max", "min", "select_n"}
_PRODUCTS = {"mul", "div", "dot_general", "conv_general_dilated"}
_TO_WORKERS = {"all_to_all", "pcast", "ppermute", "pvary"}
# A parameter times at most this is a penalty on its size, if it is added to a gradient. Times more,
# it is a parameter that the gradient changes.
_LARGEST_DECAY = 0.1


def join(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a sum of values, or of one of them."""
    first = origins[0] if origins else Origin(Kind.CONSTANT)
    if all(each == first for each in origins):
        return first
    kinds = {each.kind for each in origins}
    kind = max(kinds)
    if Kind.GRADIENT in kinds and kind > Kind.GRADIENT:
        kind = Kind.MIXED
    arguments: frozenset[int] = frozenset()
    if kind not in (Kind.GRADIENT, Kind.MIXED):
        arguments = arguments.union(*(each.arguments for each in origins))
    return Origin(
        kind,
        first.number if len({each.number for each in origins}) == 1 else None,
        frozenset.intersection(*(each.alike for each in origins)),
        first.depends.union(*(each.depends for each in origins)),
        arguments,
        first.sums.union(*(each.sums for each in origins)),
    )


def nonlinear(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a function of values that keeps no gradients."""
    joined = join(origins)
    kinds = {Kind.STATE: Kind.OTHER, Kind.GRADIENT: Kind.MIXED}
    return Origin(kinds.get(joined.kind, joined.kind), depends=joined.depends)


def operands_of(equation: Equation, output: int) -> slice:
    """Return the numbers of the operands that a result of an equation depends on."""
    count = len(equation.outvars)
    has_one_for_each = equation.primitive.name in _KEEPING and len(equation.invars) == count
    return slice(output, output + 1) if has_one_for_each else slice(None)


def made(
    equation: Equation, variable: Any, atoms: Sequence[Any], inputs: Sequence[Origin]
) -> Origin:
    """Return the origin of a result of an equation outside of all passes of a differentiation.

    The equation holds no program, and `variable` depends on the operands `atoms`, of the origins
    `inputs`.
    """
    name = equation.primitive.name
    if not (is_inexact(variable) or (name in _KEEPING and _is_of(variable, jnp.integer))):
        return Origin(Kind.CONSTANT)
    if name in _KEEPING:
        pairs = [pair for pair in zip(atoms, inputs, strict=True) if is_inexact(pair[0])]
        result = join([each for _, each in pairs] or inputs)  # without indices and masks
        number = _kept_number(equation, variable, result.number)
        if name in _BOUNDING and result.kind in (Kind.GRADIENT, Kind.MIXED):
            result = _bounded(name, pairs) or result
    elif name in _PRODUCTS:
        result = _product(equation, inputs)
        number = result.number
    else:
        result, number = nonlinear(inputs), None
    alike = _alike(equation, variable, atoms, inputs)
    if (result.number, result.alike) == (number, alike):
        return result
    return result._replace(number=number, alike=alike)


def _bounded(name: str, pairs: Sequence[tuple[Any, Origin]]) -> Origin | None:
    """Return the origin of operands of `_BOUNDING` without numbers; None if they are numbers all.

    The larger one of two gradients, such as a magnitude, is none.
    """
    arrays = [
        each
        for atom, each in pairs
        if each.kind == Kind.GRADIENT or not (each.alike or is_one(atom))
    ]
    several = sum(each.kind == Kind.GRADIENT for each in arrays) > 1
    if several and name != "select_n":
        return nonlinear(arrays)
    return join(arrays) if arrays else None


def _alike(
    equation: Equation, variable: Any, atoms: Sequence[Any], inputs: Sequence[Origin]
) -> frozenset[int]:
    """Return the dimensions of a result along which all elements are the same number."""
    shape, params = _shape(variable), equation.params
    if equation.primitive.name == "broadcast_in_dim":
        before = _shape(atoms[0])
        pairs = enumerate(params["broadcast_dimensions"])
        differ = {n for o, n in pairs if before[o] != 1 and o not in inputs[0].alike}
        return _long_dimensions(variable) - differ
    arrays = [i for i, atom in enumerate(atoms) if not is_one(atom)]
    if not atoms or not all(inputs[i].alike for i in arrays):
        return frozenset()
    if equation.primitive.name == "transpose" and arrays:
        pairs = enumerate(params["permutation"])
        return frozenset(new for new, old in pairs if old in inputs[0].alike)
    if all(_shape(atoms[i]) == shape for i in arrays):
        return _long_dimensions(variable).intersection(*(inputs[i].alike for i in arrays))
    are_numbers = all(inputs[i].alike == _long_dimensions(atoms[i]) for i in arrays)
    return _long_dimensions(variable) if are_numbers else frozenset()


def _long_dimensions(atom: Any) -> frozenset[int]:
    return frozenset(dim for dim, count in enumerate(_shape(atom)) if count != 1)


def continued(equation: Equation, inputs: Sequence[Origin]) -> set[SumResult]:
    """Return the sums that an equation of a backward pass, without programs, computes further with.

    Not those of which it merely changes the form or the scale. A sum that is the same on all
    workers may also be multiplied by arrays: parameters that are normalized, say, before the
    workers use them. A contraction of rows sums its terms again, but for the total that a scatter
    begins with.
    """
    if is_over_rows(equation):
        is_scatter = as_written(equation).primitive.name == "scatter-add"
        return {each for origin in inputs[is_scatter:] for each in origin.sums}
    found = {each for origin in inputs for each in origin.sums}
    name = equation.primitive.name
    if found and name in _PRODUCTS:
        is_number, whole = _are_numbers(equation, inputs), size(equation.outvars[0])
        scaled = [is_number[1 - i] or inputs[1 - i].kind <= Kind.STATE for i in (0, 1)]
        found = {
            each
            for origin, is_scaled in zip(inputs, scaled, strict=True)
            for each in origin.sums
            if not (is_scaled or (each.is_same and name in ("mul", "div") and whole <= each.size))
        }
    elif found and name in _KEEPING:
        is_sent = name in _TO_WORKERS or over_axes(equation) is not None
        found = {each for each in found if is_sent and each.axes.intersection(axes_of(equation))}
    return found


def _kept_number(equation: Equation, variable: Any, number: float | None) -> float | None:
    """Return the number that an equation of `_KEEPING` makes of one; None if it is not known."""
    name, params = equation.primitive.name, equation.params
    if number is None or name == "bitcast_convert_type" or (number != 0 and name not in _LIKE):
        return None
    if name == "gather" and params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        return number if params["fill_value"] == 0 else None
    if name == "convert_element_type" and number != 0:  # a small one may be zero of a dtype
        if not _is_of(variable, jnp.floating):
            return None
        with np.errstate(all="ignore"):
            return float(np.asarray(number).astype(variable.aval.dtype))
    return number


def _product(equation: Equation, inputs: Sequence[Origin]) -> Origin:
    """Return the origin of a product or a quotient.

    Scaled by numbers, a value keeps its kind. So does a gradient times what no pass of a
    differentiation has made or read.
    """
    first, second = inputs
    is_number, is_quotient = _are_numbers(equation, inputs), equation.primitive.name == "div"
    if _is_zero(is_quotient, first.number, second.number):
        return Origin(Kind.CONSTANT, 0.0)
    sums, depends = first.sums | second.sums, first.depends | second.depends
    if is_quotient and not is_number[1]:
        second = nonlinear([second])
    low, high = (first, second) if first.kind <= second.kind else (second, first)
    if low.kind == high.kind == Kind.GRADIENT:
        result = nonlinear([first, second])
    elif is_number[0] != is_number[1]:
        array, factor = (second, first) if is_number[0] else (first, second)
        is_small = factor.number is not None and abs(factor.number) <= _LARGEST_DECAY
        is_decay = array.kind == Kind.OTHER and array.arguments and is_small and not is_quotient
        result = array._replace(kind=Kind.STATE) if is_decay else array
    elif low.kind == Kind.CONSTANT or (low.kind, high.kind) == (Kind.STATE, Kind.GRADIENT):
        result = high
    # Of two that are repeated along other dimensions, the product is an outer one.
    elif (
        all(is_number)
        and Kind.GRADIENT in (low.kind, high.kind)
        and (first.alike & second.alike or any(map(is_one, equation.invars)))
    ):
        result = Origin(Kind.GRADIENT)
    else:
        result = nonlinear([first, second])
    return result._replace(number=None, sums=sums, depends=depends)


def _are_numbers(equation: Equation, inputs: Sequence[Origin]) -> tuple[bool, bool]:
    """Return which operands of a product are numbers that scale the other one."""
    match equation.primitive.name:
        case "conv_general_dilated":
            return False, False
        case "dot_general":  # one number for each slice of the other operand
            contracted, batch = equation.params["dimension_numbers"]
            left, right = (
                len(_shape(equation.invars[i])) - len(contracted[i]) - len(batch[i]) for i in (0, 1)
            )
            return left == 0 < right, right == 0 < left
    whole = _shape(equation.outvars[0])
    first, second = (
        bool(origin.alike) or is_one(atom) or _shape(atom) != whole
        for atom, origin in zip(equation.invars, inputs, strict=True)
    )
    return first, second


def _is_zero(is_quotient: bool, first: float | None, second: float | None) -> bool:
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return False
    return first == 0 != second if is_quotient else 0 in (first, second)


def is_inexact(atom: Any) -> bool:
    """Return whether a value is floating or complex."""
    return _is_of(atom, jnp.inexact)


def is_real(atom: Any) -> bool:
    """Return whether a value is floating or an integer."""
    return _is_of(atom, jnp.floating) or _is_of(atom, jnp.integer)


def _is_of(atom: Any, kind: Any) -> bool:
    dtype = getattr(atom.aval, "dtype", None)  # tokens have none
    return dtype is not None and _is_subtype(dtype, kind)


_is_subtype = functools.cache(jnp.issubdtype)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def size(atom: Any) -> Any:
    """Return the number of elements of a value."""
    return math.prod(_shape(atom))


def is_one(atom: Any) -> bool:
    """Return whether a value is a single number."""
    shape = _shape(atom)
    return shape.count(1) == len(shape)
