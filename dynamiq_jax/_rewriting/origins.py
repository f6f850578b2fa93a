"""Origins of the values of a traced program: which of them are gradients, by the flow of data.

One pass over the equations in their order, through the programs inside, with loops to a fixed
point. The equations of a backward pass make gradients, and `kinds.py` has the others that keep
them.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.kinds import (
    Kind,
    Origin,
    SumResult,
    continued,
    is_inexact,
    is_one,
    is_real,
    join,
    made,
    nonlinear,
    operands_of,
    size,
)
from dynamiq_jax._rewriting.sums import (
    Differentiation,
    as_written,
    differentiation_of,
    is_over_rows,
    joined,
    over_axes,
)
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation, Program

# Sums whose results are the same on all workers, by their types.
_OF_ALL = {"psum_invariant", "reshard"}


class _Facts(NamedTuple):
    """Facts about a whole program, which the pass collects."""

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
        (result,) = self.outputs[operand].sums
        return result in self.facts.continued and result not in self.facts.read_sums


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
    is_first = True
    while True:
        before = len(read)
        flow = _Flow(_Facts(read, set(), set()), all_turns=not is_first)
        traced = flow.program(program, list(map(flow.argument, opened.invars)), "", ())
        if len(read) == before and not is_first:
            return traced
        is_first = False


class _Flow:
    """One pass over a program, with one turn of each loop or with all that it takes."""

    def __init__(self, facts: _Facts, *, all_turns: bool):
        self.facts = facts
        self._all_turns = all_turns
        self._numbers: dict[Any, int] = {}  # of arguments and constants

    def argument(self, variable: Any) -> Origin:
        """Return the origin of an argument or a constant of the program."""
        if not is_inexact(variable):
            return Origin(Kind.CONSTANT)
        number = self._numbers.setdefault(variable, len(self._numbers))
        kind = Kind.OTHER if number in self.facts.read else Kind.STATE
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
            outputs = tuple(join(values) for values in zip(*results, strict=True))
        else:
            outputs = self._results(equation, inputs, scopes, path)
        return TracedEquation(equation, scopes, inputs, outputs, tuple(entered), path, self.facts)

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
            return self.program(part.program, [nonlinear(inputs)] * len(invars), scopes, path)
        values = [inputs[number] for number in part.inputs]
        while True:
            before, known = list(values), set(self.facts.continued)
            traced = self.program(part.program, values, scopes, path)
            for output, place in part.carried.items():
                values[place] = join([values[place], traced.outputs[output]])
            if values == before or not self._all_turns:
                return traced
            self.facts.continued.intersection_update(known)  # this turn had values of other origins

    def _results(
        self,
        equation: Equation,
        inputs: Sequence[Origin],
        scopes: str,
        path: tuple[Hashable, ...],
    ) -> tuple[Origin, ...]:
        """Return the origins of the results of an equation without programs, and collect facts."""
        here, written = _pass_of(scopes), as_written(equation)
        if here == "forward":
            for each in inputs:
                self.facts.read.update(each.arguments)
                self.facts.read_sums.update(each.sums)
        outputs = []
        for number, variable in enumerate(equation.outvars):
            places = operands_of(written, number)
            operands = inputs[places]
            result = made(written, variable, equation.invars[places], operands)
            if here == "backward":
                self.facts.continued.update(continued(written, operands))
                result = result._replace(kind=Kind.GRADIENT, arguments=frozenset())
            elif here == "forward" and result.kind != Kind.CONSTANT:
                result = result._replace(kind=Kind.FORWARD, arguments=frozenset())
            if result.number == 0:
                result = Origin(Kind.CONSTANT, 0.0)
            if summed := over_axes(equation):
                is_same = written is not equation or equation.primitive.name in _OF_ALL
                itself = SumResult(path, number, frozenset(summed[1]), is_same, size(variable))
                result = result._replace(sums=frozenset({itself}))
            elif result.sums and (result.kind != Kind.GRADIENT or is_one(variable)):
                result = result._replace(sums=frozenset())
            outputs.append(result)
        return tuple(outputs)


@functools.cache
def _pass_of(scopes: str) -> Differentiation | None:
    """Return the pass that makes the values of an equation.

    A gradient in the forward pass of another differentiation is a gradient all the same.
    """
    is_inside = "transpose(" in scopes and "rematted_computation" not in scopes
    return "backward" if is_inside else differentiation_of(scopes)


def _origin_of(atom: Any, known: Mapping[Any, Origin]) -> Origin:
    if equations.is_variable(atom):
        return known[atom]
    return Origin(Kind.CONSTANT, float(atom.val) if is_real(atom) else None)
