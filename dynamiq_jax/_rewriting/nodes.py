"""Equations of a traced program as a flat list, in which calls are replaced by what they call."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jax.extend.core import Literal

from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.sums import (
    NOT_FLOATING,
    OF_GRADIENTS,
    SMALL,
    Selection,
    Sum,
    joined,
    sums_of,
)
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation, Program


class Value(NamedTuple):
    """Variable of a program, in one call of it."""

    variable: Any
    call: int  # number of the call


class SumTerms(NamedTuple):
    """Terms of a sum that another equation has made: one that holds a program, or a linear one."""

    result: Value  # the sum


@dataclasses.dataclass(frozen=True)
class FirstTerms:
    """Terms with which the total of the turns of a loop begins."""

    result: Value  # the total


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """Constant of a program."""

    value: Any


Key = Value | SumTerms | FirstTerms | Constant
Choice = tuple[Sum, str | None]  # a sum, and why it stays exact; None: it is to be compressed


@dataclasses.dataclass
class Node:
    """Equation of a flat list."""

    equation: Equation
    scopes: str  # names of the scopes around it, its own ones included
    inputs: tuple[Key, ...]
    outputs: tuple[Value, ...]
    sums: list[Choice]  # one for each operand
    holds_target: bool  # inside of it
    holds_sum: bool  # inside of it, of a gradient whatever its size
    needed: set[int] = dataclasses.field(default_factory=set)  # outputs; see `keep_exact`
    summed: set[int] = dataclasses.field(default_factory=set)  # the same

    @property
    def is_target(self) -> bool:
        """True if an operand is to be compressed."""
        return any(why is None for _, why in self.sums)

    @property
    def may_join(self) -> bool:
        """True for sums that nothing but size or type excludes: large ones take them along."""
        return bool(self.sums) and all(why in (SMALL, NOT_FLOATING) for _, why in self.sums)


class Reader:
    """Reads traced programs, with one rule for the sums to compress."""

    def __init__(self, selection: Selection, *, opens_outermost: bool = False):
        self.selection = selection
        self._opens_outermost = opens_outermost  # call, whose settings the caller takes over
        self._calls = itertools.count()
        # The rule may be a function of a user, which is called once for each sum.
        self._choices: dict[tuple[int, str], list[Choice]] = {}

    def next_call(self) -> int:
        """Return the number of a new call of a program."""
        return next(self._calls)

    def choices(self, equation: Equation, scopes: str) -> list[Choice]:
        """Return the sums of an equation, and why each one stays exact.

        Args:
          equation: the equation.
          scopes: names of the scopes around it, its own ones included.
        """
        place = id(equation), scopes
        if place not in self._choices:
            self._choices[place] = [
                (each, self.selection.why_exact(each, equation.params))
                for each in sums_of(equation, scopes)
            ]
        return self._choices[place]

    def inside(self, equation: Equation, scopes: str) -> Iterator[Choice]:
        """Yield the sums inside of an equation; see `choices`."""
        for program in equations.programs_in(equation):
            for each in equations.opened(program)[0].eqns:
                here = joined(scopes, str(each.source_info.name_stack))
                yield from self.choices(each, here)
                yield from self.inside(each, here)

    def flat(
        self, program: Program, call: int, names: dict[Value, Key], scopes: str, is_mapped: bool
    ) -> Iterator[Node]:
        """Yield the equations of a program, and in place of calls that hold sums, those inside.

        Args:
          program: traced program.
          call: number of this call of it.
          names: outputs of calls, by the values that they are; filled here.
          scopes: names of the scopes around the program.
          is_mapped: whether it is inside of a map over devices.
        """
        for equation in program.eqns:
            here = joined(scopes, str(equation.source_info.name_stack))
            inputs = tuple(key_of(each, call, names) for each in equation.invars)
            whys = {why for _, why in self.inside(equation, here)}
            holds_target = None in whys
            is_call = inner.is_call(equation, is_mapped) or (call == 0 and self._opens_outermost)
            if not (holds_target and is_call):
                outputs = tuple(Value(variable, call) for variable in equation.outvars)
                sums = list(self.choices(equation, here))
                holds_sum = bool(whys & OF_GRADIENTS)
                yield Node(equation, here, inputs, outputs, sums, holds_target, holds_sum)
                continue
            called, constants = equations.opened(inner.called(equation))
            number = self.next_call()
            variables = (*called.constvars, *called.invars)
            values = (*map(Constant, constants), *inputs)
            names.update(zip((Value(v, number) for v in variables), values, strict=True))
            yield from self.flat(called, number, names, here, is_mapped)
            names.update(
                (Value(variable, call), key_of(out, number, names))
                for variable, out in zip(equation.outvars, called.outvars, strict=True)
            )


def key_of(atom: Any, call: int, names: Mapping[Value, Key]) -> Key:
    """Return the key of an input of an equation, or of an output of a program."""
    if isinstance(atom, Literal):
        return Constant(atom.val)
    value = Value(atom, call)
    return names.get(value, value)
