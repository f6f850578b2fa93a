"""Origins of the values of a traced program: which of them are gradients, by the flow of data.

One pass over the equations in their order, through the programs inside, with loops to a fixed
point. The equations of a backward pass make gradients, and `kinds.py` has the others that keep
them.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

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
from dynamiq_jax._rewriting.nodes import Node, StepProgram
from dynamiq_jax._rewriting.sums import Differentiation, as_written, differentiation_of, over_axes
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

Path = tuple[Hashable, ...]  # of an equation: its number, and those of all around it
Origins = tuple[Origin, ...]
# Sums whose results are the same on all workers, by their types.
_OF_ALL = {"psum_invariant", "reshard"}


def origins_of(program: StepProgram) -> tuple[StepProgram, frozenset[SumResult]]:
    """Return a program with its equations and the origins of their values, and the sums with which
    a backward pass goes on. One that a loss has as a coefficient is none.
    """
    read: set[int] = set()
    found = None
    while True:
        before, is_first = len(read), found is None
        flow = _Flow(read, all_turns=not is_first)
        inputs = list(map(flow.argument, program.opened.invars))
        found = flow.program(program, inputs, "", (), found)
        if len(read) == before and not is_first:
            return found, frozenset(flow.continued - flow.read_sums)


class _Flow:
    """One pass over a program, with one turn of each loop or with all that it takes."""

    def __init__(self, read: set[int], *, all_turns: bool):
        self.read = read  # arguments that a forward pass reads
        self.read_sums: set[SumResult] = set()  # the same of sums
        self.continued: set[SumResult] = set()  # with which a backward pass goes on
        self._all_turns = all_turns
        self._numbers: dict[Any, int] = {}  # of arguments and constants

    def argument(self, variable: Any) -> Origin:
        """Return the origin of an argument or a constant of the program."""
        if not is_inexact(variable):
            return Origin(Kind.CONSTANT)
        number = self._numbers.setdefault(variable, len(self._numbers))
        kind = Kind.OTHER if number in self.read else Kind.STATE
        itself = frozenset({number})
        return Origin(kind, depends=itself, arguments=itself)

    def program(
        self,
        program: StepProgram,
        inputs: Sequence[Origin],
        scopes: str,
        path: Path,
        before: StepProgram | None,
    ) -> StepProgram:
        """Return a program with its equations and the origins of their values, given those of its
        inputs, the names of the scopes around it, its place among others, and the program of the
        turn or pass before.
        """
        opened = program.opened
        known = {variable: self.argument(variable) for variable in opened.constvars}
        known.update(zip(opened.invars, inputs, strict=True))
        nodes = []
        for number, equation in enumerate(opened.eqns):
            values = tuple([_origin_of(atom, known) for atom in equation.invars])
            last = None if before is None else before.nodes[number]
            node = self._node(equation, values, scopes, (*path, number), last)
            known.update(zip(equation.outvars, node.results, strict=True))
            nodes.append(node)
        results = tuple(_origin_of(atom, known) for atom in opened.outvars)
        return dataclasses.replace(program, nodes=tuple(nodes), results=results)

    def _node(
        self, equation: Equation, operands: Origins, around: str, path: Path, before: Node | None
    ) -> Node:
        if before is None:
            scopes = "/".join(filter(None, (around, str(equation.source_info.name_stack))))
        # What it found of the same operands is the same, but for the sums that it continues.
        elif (
            not before.programs
            and before.operands == operands
            and not any(each.sums for each in operands)
        ):
            return before
        else:
            scopes = before.scopes
        parts, found, values = inner.programs_of(equation), dict[int, StepProgram](), list(operands)
        # The condition of a loop also has the values that its body returns.
        for number, part in sorted(enumerate(parts), key=lambda each: not each[1].carried):
            last = None if before is None else before.programs[number]
            found[number] = self._inside(part, values, scopes, (*path, number), last)
            for output, place in part.carried.items():
                assert part.inputs is not None
                operand, result = part.inputs[place], found[number].results[output]
                values[operand] = join([values[operand], result])
        programs = tuple(found[number] for number in range(len(parts)))
        if of_each := [program.results for program in programs if program.has_outputs]:
            results = tuple(join(origins) for origins in zip(*of_each, strict=True))
        else:
            results = self._results(equation, operands, scopes, path)
        return Node(equation, scopes, operands, results, programs)

    def _inside(
        self,
        part: StepProgram,
        operands: Sequence[Origin],
        scopes: str,
        path: Path,
        before: StepProgram | None,
    ) -> StepProgram:
        """Return the program of an equation; that of a loop at its fixed point."""
        if part.inputs is None:
            inputs = [nonlinear(operands)] * len(part.opened.invars)
            return self.program(part, inputs, scopes, path, before)
        values, found = [operands[number] for number in part.inputs], before
        while True:
            began, known = list(values), set(self.continued)
            found = self.program(part, values, scopes, path, found)
            for output, place in part.carried.items():
                values[place] = join([values[place], found.results[output]])
            if values == began or not self._all_turns:
                if isinstance(part.times, int) and part.times > 0:
                    return found
                # A loop without turns returns what it begins with.
                results = (
                    values[part.carried[i]] if i in part.carried else result
                    for i, result in enumerate(found.results)
                )
                return dataclasses.replace(found, results=tuple(results))
            self.continued.intersection_update(known)  # this turn had values of other origins

    def _results(
        self, equation: Equation, inputs: Sequence[Origin], scopes: str, path: Path
    ) -> Origins:
        """Return the origins of the results of an equation without programs, and collect facts."""
        here, written = _pass_of(scopes), as_written(equation)
        if here == "forward":
            for each in inputs:
                self.read.update(each.depends)
                self.read_sums.update(each.sums)
        outputs = []
        for number, variable in enumerate(equation.outvars):
            places = operands_of(written, number)
            operands = inputs[places]
            result = made(written, variable, equation.invars[places], operands)
            if here == "backward":
                self.continued.update(continued(equation, operands))
                result = Origin(Kind.GRADIENT, result.number, result.alike, sums=result.sums)
            elif here == "forward" and result.kind != Kind.CONSTANT:
                result = Origin(Kind.FORWARD, result.number, result.alike, sums=result.sums)
            if result.number == 0:
                result = Origin(Kind.CONSTANT, 0.0)
            if summed := over_axes(equation):
                is_same = written is not equation or equation.primitive.name in _OF_ALL
                itself = SumResult(path, frozenset(summed[1]), is_same, size(variable))
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
    is_number = is_real(atom) and np.ndim(atom.val) == 0
    return Origin(Kind.CONSTANT, float(atom.val) if is_number else None)
