"""Schedule of a traced program: which sums are one group, and when each equation is evaluated.

Sums wait, and so does each equation that needs one of them, until every other equation is
evaluated. Then all waiting sums of one kind are a group, which is one compressed collective. So
the sums of a tree share buckets, wherever a step uses the first of them.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import over
from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.in_front import Waiting, added_to_sums, behind, totals_among
from dynamiq_jax._rewriting.nodes import Node, StepProgram, Value, Variable
from dynamiq_jax._rewriting.placement import Placement
from dynamiq_jax._rewriting.reading import flat, kept_apart, value_of
from dynamiq_jax._rewriting.steps import (
    Compute,
    EvaluationSchedule,
    KeptSum,
    Member,
    Reduce,
    Step,
    as_it_is,
    first_terms,
    is_of,
    member_of,
    messages_of,
    summed_exactly,
    terms_of,
    terms_of_turns,
)
from dynamiq_jax._rewriting.sums import Selection, Sum, is_over_rows
from pallas_kernels._jax import equations

Sums = list[Reduce | KeptSum]  # of a step, in the order of its equations


def schedule(
    program: StepProgram, selection: Selection, *, opens_all: bool = False
) -> tuple[EvaluationSchedule, Sums]:
    """Schedule a step whose sums are chosen, and return its groups and the sums that stay as they
    are, too. For `opens_all`, see `flat`.
    """
    sums: Sums = []
    scheduler = _Scheduler(program, selection, itertools.count(), sums, opens_all=opens_all)
    return scheduler.schedule(), sums


class _Scheduler:
    """Schedules a program; another one each program inside."""

    def __init__(
        self,
        program: StepProgram,
        selection: Selection,
        calls: Iterator[int],
        sums: Sums,
        *,
        opens_all: bool = False,
    ):
        self._program = program
        self._selection = selection
        self._calls = calls
        self._sums = sums
        self._call = next(calls)
        names: dict[Variable, Value] = {}
        nodes = flat(
            program, self._call, names, calls, is_mapped=bool(program.sizes), opens_all=opens_all
        )
        self._nodes = kept_apart(list(nodes))
        self._inputs = tuple(Variable(var, self._call) for var in program.opened.invars)
        self._outputs = [value_of(out, self._call, names) for out in program.opened.outvars]
        # Number of uses of each value.
        self._uses = collections.Counter(value for node in self._nodes for value in node.inputs)
        self._uses.update(self._outputs)
        # Inputs of a loop's body that may be totals, with the outputs that the next turn takes.
        self._totals: dict[Value, int] = {
            self._inputs[program.carried[i]]: i for i in program.totals
        }
        self._added = added_to_sums(self._nodes, self._uses, self._totals)
        self._placement = Placement(self._nodes)
        self._placement.learn(self._inputs, program.input_specs)
        self._placement.learn(self._outputs, program.output_specs)

    def schedule(self) -> EvaluationSchedule:
        """Return the schedule of the program, and collect its sums."""
        # Inputs to which each turn of a loop may only add terms, and the outputs that replace them.
        carries = {value: i for value, i in self._totals.items() if value in self._added}
        before = len(self._sums)
        while True:
            steps, left, failed = self._in_order(carries)
            if not failed:
                break
            del self._sums[before:]
            carries = {value: output for value, output in carries.items() if output not in failed}
        variables = (Variable(var, self._call) for var in self._program.opened.constvars)
        return EvaluationSchedule(
            tuple(steps),
            self._inputs,
            tuple(zip(variables, self._program.constants, strict=True)),
            tuple(left[i].operand if i in left else out for i, out in enumerate(self._outputs)),
            left,
        )

    def _in_order(
        self, carries: Mapping[Value, int]
    ) -> tuple[list[Step], dict[int, Member], set[int]]:
        """Order the equations of the program. `carries` has the inputs that are treated as terms of
        a sum, and the outputs that replace them.

        Returns:
          The steps, the sums that are left to the caller, by output, and those of the outputs of
          `carries` that are no sums after all: the rest is of no use then.
        """
        steps: list[Step] = []
        left: dict[int, Member] = {}
        remaining: Sequence[Node] = self._nodes
        while remaining:
            later: list[Node] = []
            may_leave = bool(self._program.leaving or carries)
            found = Waiting(self._selection, self._uses, carries, self._added, may_leave)
            waiting: set[Value] = set(carries)
            order_matters = False
            for node in remaining:
                effects = equations.has_effects(node.equation)
                if waiting.intersection(node.inputs) or (effects and order_matters):
                    waiting.update(node.outputs)
                    if step := found.in_front(node, waiting):
                        steps.append(step)
                    else:
                        later.append(node)
                        order_matters |= effects
                    continue
                in_place, members = self._steps(node)
                steps += in_place
                waiting.update(member.result for member in members)
                found.add(node, members)
            sums = found.sums.values()
            totals = set(carries.values())
            left |= {self._outputs.index(e.result): e for e in sums if self._can_leave(e, totals)}
            if failed := totals - totals_among(left):
                return steps, left, failed
            carries = {}
            here = [self._placed(each) for each in sums if not self._can_leave(each, totals)]
            steps += self._reduced([(found.nodes[each.result], each) for each in here])
            remaining = later
        return steps, left, set()

    def _steps(self, node: Node) -> tuple[Sequence[Step], Sequence[Member]]:
        """Return the steps of an equation that waits for no sum, and the sums that it leaves."""
        if node.is_target or node.may_join:
            return [terms_of(node)] if is_over_rows(node.equation) else [], [member_of(node)]
        if not node.holds_target:
            self._sums += _kept(node, self._program)
            return [as_it_is(node)], ()
        inner.check_known(node.equation)
        programs = []
        before: list[Step] = []
        behind_it: list[Step] = []
        inputs: list[Value] = list(node.inputs)
        outputs: list[Value] = list(node.outputs)
        members: list[Member] = []
        for part in node.programs:
            program = self._inside(part, node)
            inside = _Scheduler(program, self._selection, self._calls, self._sums).schedule()
            programs.append(inside)
            for i, member in inside.left.items():
                result = node.outputs[i]
                outputs[i] = result.terms
                if i in part.carried:
                    place = part.carried[i]
                    first = first_terms(inputs[place], result, member)
                    before.append(first)
                    (inputs[place],) = first.outputs
                elif part.first_of_turn is not None and member.workers is not None:
                    outputs[i] = stacked = result._replace(role="terms of turns")
                    behind_it.append(terms_of_turns(stacked, member.workers))
                shape = equations.shape_of(node.equation.outvars[i])  # of all turns of a loop
                if whole := behind(self._selection, member, shape):
                    members.append(dataclasses.replace(whole, operand=result.terms, result=result))
        entered = Compute(
            functools.partial(inner.make_anew, node.equation, node.scopes),
            tuple(inputs),
            tuple(outputs),
            messages_of(node.equation),
            tuple(programs),
        )
        return [*before, entered, *behind_it], members

    def _inside(self, part: StepProgram, node: Node) -> StepProgram:
        """Return a program of an equation with what is known of its inputs and outputs here.

        Specs of parts of an array, as in a turn of a loop, are not known.
        """

        def specs(
            atoms: Sequence[Any], inside: Sequence[Any], values: Sequence[Value]
        ) -> dict[int, PartitionSpec]:
            return {
                i: spec
                for i, spec in self._placement.specs(values).items()
                if equations.shape_of(atoms[i]) == equations.shape_of(inside[i])
            }

        numbers = part.inputs or ()
        atoms = [node.equation.invars[i] for i in numbers]
        before = specs(atoms, part.opened.invars, [node.inputs[i] for i in numbers])
        after = {}
        if part.has_outputs:
            after = specs(node.equation.outvars, part.opened.outvars, node.outputs)
        begins_at_zero = (i for i in part.totals if node.operands[part.carried[i]].number == 0)
        return part.within(
            self._program,
            inside=self._program.inside or node.equation,
            shapes=list(map(equations.shape_of, node.equation.outvars)),
            totals=tuple(begins_at_zero),
            input_specs={**before, **part.input_specs},
            output_specs={**after, **part.output_specs},
        )

    def _reduced(self, sums: Sequence[tuple[Node, Member]]) -> Iterator[Step]:
        """Yield a group for each kind of sums with a large one; others stay as they are."""
        program = self._program
        kinds: dict[Any, list[tuple[Node, Member]]] = {}
        for node, member in sums:
            kinds.setdefault(member.kind, []).append((node, member))
        for of_kind in kinds.values():
            members = tuple(member for _, member in of_kind)
            if any(member.why_exact is None for member in members):
                sizes = {**equations.explicit_sizes(of_kind[0][0].equation), **program.sizes}
                if (workers := members[0].workers) is not None:
                    sizes |= {workers.axis: workers.count}
                number = sum(isinstance(each, Reduce) for each in self._sums)
                managed = program.automatic(workers)
                axes = members[0].description.axes
                compressed_over = tuple(name for name in self._selection.axes if name in axes)
                group = Reduce(members, compressed_over, program, sizes, managed, number)
                self._sums.append(group)
                yield group
                continue
            moved = [(node, member) for node, member in of_kind if not is_of(node, member)]
            here = [(node, member) for node, member in of_kind if is_of(node, member)]
            for node, member in [*moved, *here]:
                self._sums.append(_kept_sum(member.description, member.why_exact, node, program))
            if moved:
                yield summed_exactly([member for _, member in moved])
            yield from (as_it_is(node) for node, _ in here)

    def _placed(self, member: Member) -> Member:
        """Return a sum with what is known of where its result lies."""
        if automatic := self._program.automatic(member.workers):
            spec = self._placement.spec(member.result, automatic)
            if spec is None and member.result in self._outputs:
                likely = self._program.likely_specs.get(self._outputs.index(member.result))
                spec = None if likely is None else over(likely, automatic)
            member = dataclasses.replace(member, spec=spec)
        if (workers := member.workers) is None:
            return member
        if "psum_scatter" in self._selection.operations:
            dim = self._placement.scattered(member.result, workers.axis)
            if dim is not None and member.description.shape[dim] % workers.count == 0:
                member = member.scattered(dim)
        sizes, fast = workers.mesh.shape, self._selection.axes[1:]
        return member.split_over({name: sizes[name] for name in fast if name in sizes})

    def _can_leave(self, member: Member, totals: Collection[int]) -> bool:
        """Return whether the caller can do a sum: a result, and nothing else. Carried outputs in
        `totals` may be sums, too.
        """
        if self._uses[member.result] > 1 or member.result not in self._outputs:
            return False
        output = self._outputs.index(member.result)
        if member.description.operation != "psum":
            return False
        if output not in self._program.leaving and output not in totals:
            return False
        return behind(self._selection, member, self._program.shapes[output]) is not None


def _kept(node: Node, around: StepProgram) -> Iterator[KeptSum]:
    """Yield the sums of an equation, and of all inside of it, that stay as they are."""
    if node.sum is not None:
        yield _kept_sum(node.sum, node.why_exact, node, around)
    for program in node.programs:
        within = program.within(around)
        for each in program.nodes:
            yield from _kept(each, within)


def _kept_sum(description: Sum, why: str | None, node: Node, around: StepProgram) -> KeptSum:
    params = node.equation.params
    has_parts = params.get("axis_index_groups") is not None or around.automatic()
    sizes = {**equations.explicit_sizes(node.equation), **around.sizes}
    if is_over_rows(node.equation):
        sizes |= params["workers"].mesh.shape
    return KeptSum(description, why, around.times, None if has_parts else sizes)
