"""Origins of the values of a traced program: which of them are gradients, by the flow of data.

One pass over the equations in their order, through the programs inside, with loops to a fixed
point. The equations of a backward pass make gradients. Others keep them: those that change their
form, add them, or scale them by numbers.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.sums import (
    Differentiation,
    axes_of,
    differentiation_of,
    is_over_rows,
    joined,
    over_axes,
)
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation, Program


class Kind(enum.IntEnum):
    """What a value is."""

    CONSTANT = 0  # numbers, masks and noise: of no floating argument
    STATE = 1  # arguments that no forward pass reads, as accumulated gradients; and sums of them
    GRADIENT = 2
    FORWARD = 3  # of a forward pass
    OTHER = 4  # parameters, and all else that no backward pass has made
    MIXED = 5  # made of gradients and none itself, as a product of two or a changed parameter


class SumResult(NamedTuple):
    """Result of a sum over axes."""

    path: tuple[Hashable, ...]  # of the equation; see `TracedEquation`
    operand: int  # number
    axes: frozenset[str]
    is_same: bool  # on all workers, by its type
    size: Any  # elements


class Origin(NamedTuple):
    """Origin of a value."""

    kind: Kind
    number: float | None = None  # that all elements are, if it is known
    is_spread: bool = False  # it has fewer numbers than elements, each of them several times
    # Arguments and sums of which it is another form, a multiple, or a sum.
    arguments: frozenset[int] = frozenset()  # numbers
    sums: frozenset[SumResult] = frozenset()


# Equations whose result has the numbers of their operand.
_LIKE = {
    *("broadcast_in_dim", "convert_element_type", "copy", "pcast", "pvary", "reshape", "squeeze"),
    "stop_gradient",
}
# Equations whose results are what their operands are: in another form or place, added, or clipped.
_KEEPING = _LIKE | {
    *("add", "add_any", "all_gather", "all_gather_invariant", "all_to_all", "and"),
    *(
        "bitcast_convert_type",
        "ceil",
        "clamp",
        "complex",
        "concatenate",
        "conj",
        "cumsum",
        "device_put",
    ),
    *(
        "dynamic_slice",
        "dynamic_update_slice",
        "fft",
        "floor",
        "gather",
        "imag",
        "layout_constraint",
        "max",
    ),
    *("min", "name", "neg", "not", "optimization_barrier", "or", "pad", "pbroadcast", "ppermute"),
    *("preduced", "psum", "psum_invariant", "real", "reduce_precision", "reduce_scatter"),
    *("reduce_sum", "reduce_window_sum", "reduced_vary_cast", "reduced_vary_cast_p", "relayout"),
    *("reshard", "rev", "round", "scatter", "scatter-add", "scatter-sub", "select_n"),
    *("sharding_constraint", "shift_left", "shift_right_logical", "slice", "split", "stack", "sub"),
    *("tile", "transpose", "unreduced_psum", "unreduced_reduce_scatter", "unstack"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p", "with_memory_space_constraint", "xor"),
}
_PRODUCTS = {"mul", "div", "dot_general", "conv_general_dilated"}
_TO_WORKERS = {"all_to_all", "pcast", "ppermute", "pvary"}
# A parameter times at most this is a penalty on its size, if it is added to a gradient. Times more,
# it is a parameter that the gradient changes.
_LARGEST_DECAY = 0.1


class _Facts(NamedTuple):
    """Facts about a whole program."""

    read: set[int]  # arguments that a forward pass reads
    read_sums: set[SumResult]  # the same of sums
    continued: set[SumResult]  # with which a backward pass goes on


@dataclasses.dataclass(frozen=True, eq=False)
class TracedEquation:
    """Equation of a traced program, with the origins of its values."""

    equation: Equation
    scopes: str  # names of the scopes around it, its own ones included
    inputs: tuple[Origin, ...]
    outputs: tuple[Origin, ...]
    programs: tuple["TracedProgram", ...]  # inside, in the order of `inner.programs_of`
    path: tuple[Hashable, ...]  # of the program that holds it, and its place there
    facts: _Facts

    @property
    def terms(self) -> tuple[Origin, ...]:
        """Origins of the terms of a sum."""
        return self.outputs if is_over_rows(self.equation) else self.inputs

    def is_continued(self, operand: int) -> bool:
        """Return whether a backward pass goes on with the sum of an operand.

        Not so if a loss has the sum as a coefficient.
        """
        result = self.outputs[operand].sums
        return not result.isdisjoint(self.facts.continued - self.facts.read_sums)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedProgram:
    """Traced program, with the origins of its values."""

    program: Program
    constants: Sequence[Any]
    equations: tuple[TracedEquation, ...]
    outputs: tuple[Origin, ...]


def origins_of(program: Any) -> TracedProgram:
    """Return a traced program with the origins of its values."""
    opened, _ = equations.opened(program)
    read: set[int] = set()
    while True:
        before = set(read)
        flow = _Flow(_Facts(read, set(), set()))
        traced = flow.program(program, list(map(flow.argument, opened.invars)), "", ())
        if read == before:
            return traced


class _Flow:
    """One pass over a program."""

    def __init__(self, facts: _Facts):
        self._facts = facts
        self._numbers: dict[Any, int] = {}  # of arguments and constants

    def argument(self, variable: Any) -> Origin:
        """Return the origin of an argument or a constant of the program."""
        if not _is_inexact(variable):
            return Origin(Kind.CONSTANT)
        number = self._numbers.setdefault(variable, len(self._numbers))
        kind = Kind.OTHER if number in self._facts.read else Kind.STATE
        return Origin(kind, arguments=frozenset({number}))

    def program(
        self, program: Any, inputs: Sequence[Origin], scopes: str, path: tuple[Hashable, ...]
    ) -> TracedProgram:
        """Return a program with the origins of its values.

        Args:
          program: traced program.
          inputs: origins of its inputs.
          scopes: names of the scopes around it.
          path: its place among others.
        """
        opened, constants = equations.opened(program)
        known = {variable: self.argument(variable) for variable in opened.constvars}
        known.update(zip(opened.invars, inputs, strict=True))
        traced = []
        for number, equation in enumerate(opened.eqns):
            here = joined(scopes, str(equation.source_info.name_stack))
            values = tuple(_origin_of(atom, known) for atom in equation.invars)
            each = self._equation(equation, values, here, (*path, number))
            known.update(zip(equation.outvars, each.outputs, strict=True))
            traced.append(each)
        outputs = tuple(_origin_of(atom, known) for atom in opened.outvars)
        return TracedProgram(opened, constants, tuple(traced), outputs)

    def _equation(
        self,
        equation: Equation,
        inputs: tuple[Origin, ...],
        scopes: str,
        path: tuple[Hashable, ...],
    ) -> TracedEquation:
        parts = inner.programs_of(equation)
        entered = [
            self._part(part, inputs, scopes, (*path, number)) for number, part in enumerate(parts)
        ]
        results = [
            traced.outputs for part, traced in zip(parts, entered, strict=True) if part.has_outputs
        ]
        if results:
            outputs = tuple(_join(*values) for values in zip(*results, strict=True))
        else:
            outputs = self._results(equation, inputs, scopes, path)
        return TracedEquation(equation, scopes, inputs, outputs, tuple(entered), path, self._facts)

    def _part(
        self,
        part: inner.InnerProgram,
        inputs: Sequence[Origin],
        scopes: str,
        path: tuple[Hashable, ...],
    ) -> TracedProgram:
        """Return the program of an equation; that of a loop at its fixed point."""
        if part.inputs is None:
            invars = equations.opened(part.program)[0].invars
            return self.program(part.program, [_nonlinear(inputs)] * len(invars), scopes, path)
        values = [inputs[number] for number in part.inputs]
        while True:
            before, continued = list(values), set(self._facts.continued)
            traced = self.program(part.program, values, scopes, path)
            for output, place in part.carried.items():
                values[place] = _join(values[place], traced.outputs[output])
            if values == before:
                return traced
            self._facts.continued.intersection_update(continued)  # of values that were others

    def _results(
        self,
        equation: Equation,
        inputs: Sequence[Origin],
        scopes: str,
        path: tuple[Hashable, ...],
    ) -> tuple[Origin, ...]:
        """Return the origins of the results of an equation without programs, and collect facts."""
        contraction = equation.params["equation"] if is_over_rows(equation) else equation
        name, here = contraction.primitive.name, _pass_of(scopes)
        if here == "forward":
            self._facts.read.update(*(each.arguments for each in inputs))
            self._facts.read_sums.update(*(each.sums for each in inputs))
        is_each = name in _KEEPING and len(inputs) == len(equation.outvars)  # one for each operand
        outputs = []
        for number, variable in enumerate(equation.outvars):
            place = slice(number, number + 1) if is_each else slice(None)
            made = _made(contraction, variable, equation.invars[place], inputs[place])
            if here == "backward":
                self._facts.continued.update(_continued(contraction, inputs[place]))
                made = made._replace(kind=Kind.GRADIENT)
            elif here == "forward" and made.kind != Kind.CONSTANT:
                made = made._replace(kind=Kind.FORWARD)
            if made.number == 0:
                made = made._replace(kind=Kind.CONSTANT)
            if made.kind != Kind.GRADIENT or _is_one(variable):
                made = made._replace(sums=frozenset())
            if summed := over_axes(equation):
                is_same = contraction is not equation or name in ("psum_invariant", "reshard")
                result = SumResult(path, number, frozenset(summed[1]), is_same, _size(variable))
                made = made._replace(sums=frozenset({result}))
            outputs.append(made)
        return tuple(outputs)


@functools.cache
def _pass_of(scopes: str) -> Differentiation | None:
    """Return the pass that makes the values of an equation.

    A gradient in the forward pass of another differentiation is a gradient all the same.
    """
    outer = differentiation_of(scopes)
    is_inside = "transpose(" in scopes and "rematted_computation" not in scopes
    return "backward" if outer and is_inside else outer


def _origin_of(atom: Any, known: Mapping[Any, Origin]) -> Origin:
    if equations.is_variable(atom):
        return known[atom]
    return Origin(Kind.CONSTANT, float(atom.val) if _is_inexact(atom) else None)


def _join(*origins: Origin) -> Origin:
    """Return the origin of a sum of values, or of one of them."""
    kinds = {each.kind for each in origins}
    kind = max(kinds, default=Kind.CONSTANT)
    if Kind.GRADIENT in kinds and kind > Kind.GRADIENT:
        kind = Kind.MIXED
    numbers = {each.number for each in origins}
    is_argument = kind not in (Kind.GRADIENT, Kind.MIXED)
    return Origin(
        kind,
        numbers.pop() if len(numbers) == 1 else None,
        bool(origins) and all(each.is_spread for each in origins),
        frozenset().union(*(each.arguments for each in origins if is_argument)),
        frozenset().union(*(each.sums for each in origins)),
    )


def _made(
    equation: Equation, variable: Any, atoms: Sequence[Any], inputs: Sequence[Origin]
) -> Origin:
    """Return the origin of a result of an equation, whatever pass it is in.

    Args:
      equation: equation without programs.
      variable: the result.
      atoms: operands that the result depends on.
      inputs: their origins.
    """
    name = equation.primitive.name
    if name in _KEEPING:
        floating = [each for atom, each in zip(atoms, inputs, strict=True) if _is_inexact(atom)]
        made = _join(*(floating or inputs))  # without indices and masks
        if name not in _LIKE and made.number != 0:
            made = made._replace(number=None)
    elif name in _PRODUCTS:
        made = _product(equation, inputs)
    else:
        made = _nonlinear(inputs)
    is_bits = name in _KEEPING and jnp.issubdtype(equations.dtype_of(variable), jnp.integer)
    if not (_is_inexact(variable) or is_bits):
        return Origin(Kind.CONSTANT)
    is_spread = all(each.is_spread or _is_one(a) for a, each in zip(atoms, inputs, strict=True))
    grows = name == "broadcast_in_dim" and _size(atoms[0]) != _size(variable)
    return made._replace(is_spread=bool(atoms) and (is_spread or grows))


def _nonlinear(inputs: Sequence[Origin]) -> Origin:
    """Return the origin of a function of values that keeps no gradients."""
    kind = _join(*inputs).kind
    return Origin({Kind.STATE: Kind.OTHER, Kind.GRADIENT: Kind.MIXED}.get(kind, kind))


def _product(equation: Equation, inputs: Sequence[Origin]) -> Origin:
    """Return the origin of a product or a quotient.

    Scaled by numbers, a value stays what it is. So does a gradient times what no pass of a
    differentiation has made or read.
    """
    first, second = inputs
    is_number, is_quotient = _are_numbers(equation, inputs), equation.primitive.name == "div"
    sums = first.sums | second.sums
    if _is_zero(is_quotient, first.number, second.number):
        return Origin(Kind.CONSTANT, 0.0)
    if is_quotient and not is_number[1]:
        second = _nonlinear([second])
    low, high = sorted((first, second), key=lambda each: each.kind)
    if is_number[0] != is_number[1]:
        array, factor = (second, first) if is_number[0] else (first, second)
        is_small = factor.number is not None and abs(factor.number) <= _LARGEST_DECAY
        is_decay = array.kind == Kind.OTHER and array.arguments and is_small and not is_quotient
        made = array._replace(kind=Kind.STATE) if is_decay else array
    elif low.kind == Kind.CONSTANT or (low.kind, high.kind) == (Kind.STATE, Kind.GRADIENT):
        made = high
    elif all(is_number) and Kind.GRADIENT in (low.kind, high.kind):
        made = Origin(Kind.GRADIENT)
    else:
        made = _nonlinear([first, second])
    return made._replace(number=None, sums=sums)


def _continued(equation: Equation, inputs: Sequence[Origin]) -> set[SumResult]:
    """Return the sums with which a backward pass goes on by an equation.

    Not those of which it merely changes the form or the scale. A sum that is the same on all
    workers may also be multiplied by arrays: parameters that are normalized, say, before the
    workers use them.
    """
    name = equation.primitive.name
    if name in _PRODUCTS:
        is_number, size = _are_numbers(equation, inputs), _size(equation.outvars[0])
        pairs = [(inputs[i], inputs[1 - i], is_number[1 - i]) for i in (0, 1)]
        return {
            each
            for one, other, is_scaled in pairs
            for each in one.sums
            if not (is_scaled or other.kind <= Kind.STATE)
            and not (each.is_same and size <= each.size and name in ("mul", "div"))
        }
    found = set().union(*(each.sums for each in inputs))
    if name not in _KEEPING:
        return found
    is_sent = name in _TO_WORKERS or over_axes(equation) is not None
    return {each for each in found if is_sent and each.axes.intersection(axes_of(equation))}


def _are_numbers(equation: Equation, inputs: Sequence[Origin]) -> tuple[bool, bool]:
    """Return which operands of a product are numbers that scale the other one."""
    match equation.primitive.name:
        case "conv_general_dilated":
            return False, False
        case "dot_general":  # one number for each slice of the other operand
            contracted, batch = equation.params["dimension_numbers"]
            used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
            free = [
                len(equations.shape_of(atom)) - n
                for atom, n in zip(equation.invars, used, strict=True)
            ]
            return free[0] == 0 < free[1], free[1] == 0 < free[0]
    whole = equations.shape_of(equation.outvars[0])
    first, second = (
        origin.is_spread or _is_one(atom) or equations.shape_of(atom) != whole
        for atom, origin in zip(equation.invars, inputs, strict=True)
    )
    return first, second


def _is_zero(is_quotient: bool, first: float | None, second: float | None) -> bool:
    if first is None or second is None or not (math.isfinite(first) and math.isfinite(second)):
        return False
    return first == 0 != second if is_quotient else 0 in (first, second)


def _is_inexact(atom: Any) -> bool:
    return jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact)


def _size(atom: Any) -> Any:
    return math.prod(getattr(atom.aval, "shape", ()))


def _is_one(atom: Any) -> bool:
    return bool(_size(atom) == 1)
