"""Flow of sums through a traced step: which are of zeros, unused, or only added to others.

While a step is traced for an inspection, `recording.mark` names the terms of each leaf and their
sum. Every other value of the program is described by the sums that it depends on.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dynamiq_jax._plan.recording import marked
from dynamiq_jax._rewriting.inner import programs_of
from dynamiq_jax._rewriting.nodes import StepProgram
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation, Program

# Equations that are linear in one input, in all of them together, or in each of them alone.
_OF_ONE = {
    *("broadcast_in_dim", "convert_element_type", "copy", "neg", "pcast", "pvary", "reduce_sum"),
    *("reshape", "sharding_constraint", "squeeze", "transpose"),
}
_OF_SEVERAL = {"add", "add_any", "sub"}
_PRODUCTS = {"mul", "dot_general"}  # one with a matrix is a use: a forward pass goes on

Origin = int  # number of a sum, or of a value that a loop carries


class SentLeaf(NamedTuple):
    """Leaf that a collective of a traced step sums."""

    record: int  # number of the collective in the records
    leaf: int  # index in its tree
    origins: frozenset[Origin]  # that its terms depend on
    is_zero: bool  # whether its terms are constant zeros
    times: int  # that it is sent in a step; turns of an unknown number count as one
    # Times of these after which all that is done with the sums is to add them up.
    added: int = 1


class Flow(NamedTuple):
    """Sums of a traced step, and their use."""

    sent: Mapping[Origin, SentLeaf]
    unused: frozenset[Origin]
    together: Sequence[frozenset[Origin]]  # groups that are only added up with each other


NO_FLOW = Flow({}, frozenset(), ())  # that is known


class _Value(NamedTuple):
    origins: frozenset[Origin] = frozenset()
    is_linear: bool = True  # in all origins together
    is_zero: bool = False


def flow_of(program: Any) -> Flow:
    """Return the flow of sums in a traced program."""
    reading = _Reading()
    opened, _ = equations.opened(program)
    values = reading.run(opened, [_Value()] * len(opened.invars), 1)
    reading.used.update(value.origins for value in values)
    return Flow(
        reading.sent,
        frozenset(reading.sent) - frozenset[Origin]().union(*reading.used),
        reading.together(),
    )


class _Reading:
    """A program that is read from its first equation to its last."""

    def __init__(self) -> None:
        self.sent: dict[Origin, SentLeaf] = {}
        self.terms: dict[tuple[int, int], _Value] = {}  # the last ones of each leaf
        # Origins of each value that is used in another way than by linear equations.
        self.used: set[frozenset[Origin]] = set()
        self.added: set[frozenset[Origin]] = set()  # pairs that are added to each other
        self.counters: set[Origin] = set()  # integers that loops carry
        self.next: Origin = 0

    def new(self) -> Origin:
        self.next += 1
        return self.next

    def run(self, program: Program, inputs: Sequence[_Value], times: int) -> list[_Value]:
        """Read a program that runs some times in a step; return its outputs."""
        known = dict(zip(program.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            if not equations.is_variable(atom):
                return _Value(is_zero=not np.any(np.asarray(atom.val)))
            return known.get(atom, _Value())  # or a constant

        for equation in program.eqns:
            outputs = self._of_equation(equation, [read(atom) for atom in equation.invars], times)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in program.outvars]

    def _of_equation(
        self, equation: Equation, inputs: Sequence[_Value], times: int
    ) -> Sequence[_Value]:
        name, params = equation.primitive.name, equation.params
        if name == "name" and (mark := marked(params["name"])):
            return [self._marked(*mark, inputs[0], times)]
        parts = programs_of(equation)
        if not parts or any(part.inputs is None for part in parts):
            return [self._result(name, inputs)] * len(equation.outvars)
        # The condition of a loop, and the number of a branch, are used in another way.
        conditions = {"while": params.get("cond_nconsts"), "cond": 1}.get(name, 0)
        self.used.update(value.origins for value in inputs[:conditions])
        results = [self._inside(part, inputs, times) for part in parts if part.has_outputs]
        return [_either(values) for values in zip(*results, strict=True)]

    def _inside(self, part: StepProgram, inputs: Sequence[_Value], times: int) -> list[_Value]:
        """Read a program of an equation with some inputs; return its outputs."""
        values = [inputs[number] for number in part.inputs or ()]
        if not part.carried and part.first_of_turn is None:
            return self.run(part.opened, values, times)
        last = len(values) if part.first_of_turn is None else part.first_of_turn
        first = last - len(part.carried)
        turns = values[:first], values[first:last], values[last:]
        return self._loop(part.opened, *turns, part.times or 1, times)

    def _marked(self, part: str, number: int, leaf: int, value: _Value, times: int) -> _Value:
        if part == "terms":
            self.terms[number, leaf] = value
            return value
        terms, origin = self.terms.get((number, leaf), _Value()), self.new()
        self.sent[origin] = SentLeaf(number, leaf, terms.origins, terms.is_zero, times)
        return _Value(frozenset({origin}))

    def _result(self, name: str, inputs: Sequence[_Value]) -> _Value:
        """Return the result of an equation without programs."""
        depending = [value for value in inputs if not value.origins <= self.counters]
        origins = frozenset[Origin]().union(*(value.origins for value in inputs))
        zeros = [value.is_zero for value in inputs]
        if name in _OF_SEVERAL:
            for one, other in itertools.combinations(depending, 2):
                own = one.origins - other.origins, other.origins - one.origins
                self.added.update(map(frozenset, itertools.product(*own)))
            is_linear = all(value.is_linear for value in depending)
            return _Value(origins, is_linear, all(zeros))
        if name in _OF_ONE:
            return _Value(origins, all(value.is_linear for value in inputs), zeros[0])
        if name == "select_n":
            is_linear, is_zero = inputs[0].origins <= self.counters, all(zeros[1:])
        else:
            is_linear = len(depending) < 2 and (
                name == "mul" or (name == "div" and inputs[1].origins <= self.counters)
            )
            is_zero = any(zeros) if name in _PRODUCTS else name == "div" and zeros[0]
        if is_linear:
            return _Value(origins, all(value.is_linear for value in depending), is_zero)
        self.used.add(origins)
        return _Value(origins, False, is_zero)

    def _loop(
        self,
        body: Program,
        constants: Sequence[_Value],
        first: Sequence[_Value],
        rows: Sequence[_Value],
        length: int,
        times: int,
    ) -> list[_Value]:
        zeros = [value.is_zero for value in first]
        while True:
            inside = _Reading()
            vars(inside).update({part: copy.copy(each) for part, each in vars(self).items()})
            own = [inside.new() for _ in first]
            variables = body.invars[len(constants) :]
            inside.counters.update(
                origin
                for origin, variable in zip(own, variables, strict=False)
                if jnp.issubdtype(equations.dtype_of(variable), jnp.integer)
            )
            carried = [
                _Value(value.origins | {origin}, value.is_linear, is_zero)
                for value, origin, is_zero in zip(first, own, zeros, strict=True)
            ]
            outputs = inside.run(body, [*constants, *carried, *rows], times * length)
            still = [
                before and after.is_zero for before, after in zip(zeros, outputs, strict=False)
            ]
            if still == zeros:
                break
            zeros = still
        inside.used.update(value.origins for value in outputs)
        inside._add_turns(dict(zip(own, outputs, strict=False)), length, frozenset(self.sent))
        vars(self).update(vars(inside))
        # Nothing is carried into the others, which are stacked.
        before = [*first, *[_Value(is_zero=True)] * (len(outputs) - len(first))]
        return [
            _either([value._replace(origins=value.origins - {*own}), start])
            for value, start in zip(outputs, before, strict=True)
        ]

    def _add_turns(
        self, outputs: Mapping[Origin, _Value], length: int, outside: frozenset[Origin]
    ) -> None:
        """Count the sums of a loop that are only added up from turn to turn.

        Args:
          outputs: values that the next turn takes, by the origins that they replace.
          length: number of turns.
          outside: sums in front of the loop.
        """
        sent = self.sent.keys() - outside
        needed = frozenset[Origin]().union(*(self.sent[each].origins for each in sent))
        while more := {
            origin
            for carried, value in outputs.items()
            if carried in needed
            for origin in value.origins - needed
        }:
            needed |= more
        for origin in sent - needed:  # no term of a later turn depends on it
            for carried, value in outputs.items():
                pair = frozenset({origin, carried})
                if value.is_linear and pair <= value.origins and self._are_together(pair):
                    one = self.sent[origin]
                    self.sent[origin] = one._replace(added=one.added * length)

    def together(self) -> list[frozenset[Origin]]:
        """Return groups of sums that are only added up with each other."""
        group_of = {origin: frozenset({origin}) for origin in self.sent}
        for pair in self.added:
            if pair <= self.sent.keys() and self._are_together(pair):
                joined = frozenset[Origin]().union(*(group_of[origin] for origin in pair))
                group_of.update(dict.fromkeys(joined, joined))
        return list(dict.fromkeys(group_of.values()))

    def _are_together(self, pair: frozenset[Origin]) -> bool:
        """Return whether two values are added, and nothing uses one of them without the other."""
        return pair in self.added and not any(len(each & pair) == 1 for each in self.used)


def _either(values: Sequence[_Value]) -> _Value:
    """Return a value that is one of several."""
    return _Value(
        frozenset[Origin]().union(*(value.origins for value in values)),
        all(value.is_linear for value in values),
        all(value.is_zero for value in values),
    )
