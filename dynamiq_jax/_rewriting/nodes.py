"""Equations of a traced program as a flat list, in which calls are replaced by what they call."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.kinds import Kind, Origin
from dynamiq_jax._rewriting.origins import TracedEquation, TracedProgram
from dynamiq_jax._rewriting.sums import (
    MIXED,
    NO_GRADIENT,
    NOT_CHOSEN,
    NOT_FLOATING,
    SMALL,
    ZEROS,
    Selection,
    Sum,
    SumOrigin,
    differentiation_of,
    sums_of,
)
from pallas_kernels._jax.equations import Equation


class Variable(NamedTuple):
    """Variable of a program, in one call of it."""

    var: Any
    call: int  # number of the call


class SumTerms(NamedTuple):
    """Terms of a sum that another equation has made: one that holds a program, or a linear one."""

    result: Variable  # the sum
    is_first: bool = False  # whether the total of the turns of a loop begins with them


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """Constant of a program."""

    value: Any


Value = Variable | SumTerms | Constant
# Reasons of sums that need not be sent, if their terms are zeros.
_OF_ANYTHING = (None, SMALL, NOT_CHOSEN, NO_GRADIENT["other"])
Choice = tuple[Sum, str | None]  # a sum, and why it stays exact; None: it is to be compressed


@dataclasses.dataclass
class Node:
    """Equation of a flat list."""

    traced: TracedEquation
    inputs: tuple[Value, ...]
    outputs: tuple[Variable, ...]
    sums: list[Choice]  # one for each operand
    holds_target: bool  # inside of it

    @property
    def equation(self) -> Equation:
        """The equation."""
        return self.traced.equation

    @property
    def is_target(self) -> bool:
        """True if an operand is to be compressed."""
        return any(why is None for _, why in self.sums)

    @property
    def may_join(self) -> bool:
        """True for sums that nothing but size or type excludes: large ones take them along."""
        return bool(self.sums) and all(why in (SMALL, NOT_FLOATING) for _, why in self.sums)

    @property
    def is_zeros(self) -> bool:
        """True for sums of zeros."""
        return bool(self.sums) and all(why == ZEROS for _, why in self.sums)


class Reader:
    """Reads traced programs, with one rule for the sums to compress."""

    def __init__(self, selection: Selection, *, opens_outermost: bool = False):
        self.selection = selection
        self._opens_outermost = opens_outermost  # call, whose settings the caller takes over
        self._calls = itertools.count()
        # The rule may be a function of a user, which is called once for each sum.
        self._choices: dict[TracedEquation, list[Choice]] = {}

    def next_call(self) -> int:
        """Return the number of a new call of a program."""
        return next(self._calls)

    def choices(self, traced: TracedEquation) -> list[Choice]:
        """Return the sums of an equation, and why each one stays exact."""
        if traced not in self._choices:
            sums = sums_of(traced.equation, traced.scopes, functools.partial(_origin, traced))
            choices = [
                (each, self._why_exact(each, traced, traced.terms[number]))
                for number, each in enumerate(sums)
            ]
            # Contractions that stay with the compiler are none of its sums, but for gradients.
            unsplit = traced.equation.params.get("why_exact")
            self._choices[traced] = [c for c in choices if unsplit is None or c[1] == unsplit]
        return self._choices[traced]

    def _why_exact(self, each: Sum, traced: TracedEquation, origin: Origin) -> str | None:
        why = self.selection.why_exact(each, traced.equation.params)
        is_placed = traced.equation.primitive.name == "reshard"  # zeros would lie elsewhere
        if origin.number == 0 and why in _OF_ANYTHING and not is_placed:
            return ZEROS
        return MIXED if origin.kind == Kind.MIXED and why == NO_GRADIENT["other"] else why

    def inside(self, traced: TracedEquation) -> Iterator[Choice]:
        """Yield the sums inside of an equation; see `choices`."""
        for program in traced.programs:
            for each in program.equations:
                yield from self.choices(each)
                yield from self.inside(each)

    def flat(
        self, program: TracedProgram, call: int, names: dict[Variable, Value], is_mapped: bool
    ) -> Iterator[Node]:
        """Yield the equations of a program, and in place of calls that hold sums, those inside.

        Args:
          program: traced program.
          call: number of this call of it.
          names: outputs of calls, by the values that they are; filled here.
          is_mapped: whether it is inside of a map over devices.
        """
        for traced in program.equations:
            equation = traced.equation
            inputs = tuple(value_of(each, call, names) for each in equation.invars)
            whys = {why for _, why in self.inside(traced)}
            holds_target = None in whys or ZEROS in whys
            is_call = inner.is_call(equation, is_mapped) or (call == 0 and self._opens_outermost)
            if not (holds_target and is_call):
                outputs = tuple(Variable(var, call) for var in equation.outvars)
                node = Node(traced, inputs, outputs, list(self.choices(traced)), holds_target)
                yield from _without_zeros(node)
                continue
            (called,) = traced.programs
            number = self.next_call()
            variables = (*called.program.constvars, *called.program.invars)
            values = (*map(Constant, called.constants), *inputs)
            names.update(zip((Variable(var, number) for var in variables), values, strict=True))
            yield from self.flat(called, number, names, is_mapped)
            names.update(
                (Variable(var, call), value_of(out, number, names))
                for var, out in zip(equation.outvars, called.program.outvars, strict=True)
            )


def _origin(traced: TracedEquation, number: int) -> SumOrigin:
    """Return the origin of a term of a sum."""
    if differentiation_of(traced.scopes) == "forward":
        return "forward"
    if traced.is_continued(number):
        return "backward"
    kinds: dict[Kind, SumOrigin] = {Kind.GRADIENT: "gradient", Kind.FORWARD: "forward"}
    return kinds.get(traced.terms[number].kind, "other")


def _without_zeros(node: Node) -> Iterator[Node]:
    """Yield sums of zeros apart from others."""
    is_zero = [why == ZEROS for _, why in node.sums]
    if len(set(is_zero)) < 2:
        yield node
        return
    for kept in (True, False):
        places = [i for i, each in enumerate(is_zero) if each == kept]

        def chosen(values: Sequence[Any], places: Sequence[int] = places) -> list[Any]:
            return [values[i] for i in places]

        equation = node.equation.replace(
            invars=chosen(node.equation.invars), outvars=chosen(node.equation.outvars)
        )
        yield Node(
            dataclasses.replace(node.traced, equation=equation),
            tuple(chosen(node.inputs)),
            tuple(chosen(node.outputs)),
            chosen(node.sums),
            holds_target=False,
        )


def keep_apart(nodes: Sequence[Node]) -> None:
    """Keep small sums exact that large ones need: they would wait, and split these into groups."""
    needed: set[Value] = set()  # by a sum to compress
    for node in reversed(nodes):
        is_needed = not needed.isdisjoint(node.outputs)
        if node.may_join and is_needed:
            node.sums = [(each, f"{why}, and a large one needs it") for each, why in node.sums]
        if node.is_target or node.holds_target or is_needed:
            needed.update(node.inputs)


def value_of(atom: Any, call: int, names: Mapping[Variable, Value]) -> Value:
    """Return the value of an input of an equation, or of an output of a program."""
    if isinstance(atom, Literal):
        return Constant(atom.val)
    variable = Variable(atom, call)
    return names.get(variable, variable)
