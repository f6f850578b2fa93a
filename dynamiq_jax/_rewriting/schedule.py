"""Schedule of a traced program: which sums are one group, and when each equation is evaluated.

Sums wait, and so does each equation that needs one of them, until every other equation is
evaluated. Then all waiting sums of one kind are a group, which is one compressed collective. So
the sums of a tree share buckets, wherever a step uses the first of them.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from dynamiq_jax._rewriting import inner, unreduced
from dynamiq_jax._rewriting.contractions import WorkerAxis
from dynamiq_jax._rewriting.in_front import (
    Waiting,
    behind,
    totals_among,
    totals_of_turns,
)
from dynamiq_jax._rewriting.nodes import (
    Choice,
    FirstTerms,
    Key,
    Node,
    Reader,
    SumTerms,
    Value,
    keep_apart,
    key_of,
)
from dynamiq_jax._rewriting.origins import TracedEquation, TracedProgram
from dynamiq_jax._rewriting.placement import Placement
from dynamiq_jax._rewriting.steps import (
    Enter,
    Evaluate,
    EvaluationSchedule,
    KeptSum,
    Member,
    Messages,
    Reduce,
    Step,
    SumExactly,
    evaluate,
    is_of,
    members_of,
    terms_of,
)
from dynamiq_jax._rewriting.sums import Selection, is_over_rows
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.equations import Equation


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Everything around a program that its schedule depends on."""

    times: int | None = 1  # that it runs in a call of the step; None if that is not known
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of manual axes, by name
    mesh: Any = None  # of the map; None outside of one
    # Outputs that the next turn of a loop takes as inputs, by the number of the output.
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)
    leaving: Collection[int] = ()  # outputs that may be sums, which the caller does
    shapes: Sequence[tuple[int, ...]] = ()  # of the outputs, as the caller has them
    totals: Collection[int] = ()  # carried outputs that may be sums, too: they begin at zero
    # Specs that are known, by the numbers of inputs and outputs.
    input_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    output_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)

    def of_part(self, part: inner.InnerProgram) -> "Surroundings":
        """Return what is around a program of an equation: how often it runs, and where."""
        return Surroundings(
            times=_product(self.times, part.times),
            sizes={**self.sizes, **part.sizes},
            mesh=part.mesh or self.mesh,
        )

    def automatic(self, workers: WorkerAxis | None = None) -> dict[str, int]:
        """Return the sizes of the axes of several devices that the compiler manages, by name.

        Args:
          workers: workers of a sum that the compiler places.
        """
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        kinds: tuple[Any, ...] = (AxisType.Auto,)
        manual = set(self.sizes)
        if workers is not None:
            mesh, kinds = workers.mesh, (AxisType.Auto, AxisType.Explicit)
            manual.add(workers.axis)
        return {
            name: mesh.shape[name]
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind in kinds and mesh.shape[name] > 1 and name not in manual
        }


@dataclasses.dataclass(frozen=True)
class _Flat:
    """Equations of a program."""

    nodes: Sequence[Node]
    inputs: Sequence[Value]
    outputs: Sequence[Key]
    uses: Mapping[Key, int]  # number of uses of each value
    placement: Placement
    around: Surroundings
    selection: Selection

    def place(self, member: Member) -> int | None:
        """Return the number of the output that a sum is; None if it is used otherwise, too."""
        is_output = self.uses[member.result] == 1 and member.result in self.outputs
        return self.outputs.index(member.result) if is_output else None

    def placed(self, member: Member) -> Member:
        """Return a sum with what is known of where its result lies."""
        if automatic := self.around.automatic(member.workers):
            spec = self.placement.spec(member.result, automatic)
            member = dataclasses.replace(member, spec=spec)
        if member.workers is not None and "psum_scatter" in self.selection.operations:
            dim = self.placement.scattered(member.result, member.workers.axis)
            if dim is not None and member.description.shape[dim] % member.workers.count == 0:
                return member.scattered(dim)
        return member

    def can_leave(self, member: Member, totals: Collection[int]) -> bool:
        """Return whether the caller can do a sum: a result, and nothing else.

        Args:
          member: the sum.
          totals: carried outputs that may be sums.
        """
        output = self.place(member)
        if output is None or member.description.operation != "psum":
            return False
        may_leave = output in self.around.leaving or output in totals
        return may_leave and behind(self.selection, member, self.around.shapes[output]) is not None


class Scheduler:
    """Makes the schedule of a program, and of those inside."""

    def __init__(self, selection: Selection, *, opens_outermost: bool = False):
        self.exact: list[KeptSum] = []
        self._selection = selection
        self._reader = Reader(selection, opens_outermost=opens_outermost)
        self._num_groups = 0

    def schedule(self, traced: TracedProgram, around: Surroundings) -> EvaluationSchedule:
        """Schedule a traced program."""
        opened, constants = traced.program, traced.constants
        call = self._reader.next_call()
        names: dict[Value, Key] = {}
        is_mapped = bool(around.sizes)
        nodes = list(self._reader.flat(traced, call, names, is_mapped))
        inputs = tuple(Value(variable, call) for variable in opened.invars)
        outputs = [key_of(out, call, names) for out in opened.outvars]
        uses = collections.Counter(key for node in nodes for key in node.inputs)
        uses.update(outputs)
        keep_apart(nodes)
        placement = Placement(nodes)
        placement.learn(inputs, around.input_specs)
        placement.learn(outputs, around.output_specs)
        flat = _Flat(nodes, inputs, outputs, uses, placement, around, self._selection)
        steps, left = self._in_order(flat)
        return EvaluationSchedule(
            tuple(steps),
            inputs,
            tuple(
                (Value(variable, call), constant)
                for variable, constant in zip(opened.constvars, constants, strict=True)
            ),
            tuple(left[i].operand if i in left else key for i, key in enumerate(outputs)),
            left,
        )

    def _in_order(self, flat: _Flat) -> tuple[list[Step], dict[int, Member]]:
        """Return the steps of a program, and the sums that are left to its caller, by output."""
        carried = {i: flat.around.carried[i] for i in flat.around.totals}
        carries = totals_of_turns(flat.nodes, flat.inputs, flat.uses, carried)
        while True:
            before = len(self.exact), self._num_groups
            steps, left, failed = self._try_order(flat, carries)
            if not failed:
                return steps, left
            del self.exact[before[0] :]
            self._num_groups = before[1]
            carries = {key: output for key, output in carries.items() if output not in failed}

    def _try_order(
        self, flat: _Flat, carries: Mapping[Key, int]
    ) -> tuple[list[Step], dict[int, Member], set[int]]:
        """Return steps and sums as `_in_order`, and carried outputs that are no sums after all.

        Args:
          flat: the program.
          carries: inputs that are regarded as terms of a sum, with the outputs that replace them.
        """
        steps: list[Step] = []
        left: dict[int, Member] = {}
        remaining = flat.nodes
        while remaining:
            later: list[Node] = []
            may_leave = bool(flat.around.leaving or carries)
            found = Waiting(self._selection, flat.uses, carries, may_leave)
            waiting: set[Key] = set(carries)
            nodes: dict[Key, Node] = {}  # of the sums, by their results
            order_matters = False
            for node in remaining:
                effects = equations.has_effects(node.equation)
                if waiting.intersection(node.inputs) or (effects and order_matters):
                    if moved := found.in_front(node, waiting):
                        added, member = moved
                        steps.append(added)
                        for key in node.inputs:
                            found.sums.pop(key, None)
                        found.sums[member.result], nodes[member.result] = member, node
                    else:
                        later.append(node)
                        order_matters |= effects
                    waiting.update(node.outputs)
                    continue
                if node.is_target or node.may_join:
                    members = members_of(node)
                    if is_over_rows(node.equation):
                        steps.append(terms_of(node))
                else:
                    in_place, members = self._steps(node, flat)
                    steps += in_place
                waiting.update(member.result for member in members)
                found.sums.update((member.result, member) for member in members)
                nodes.update((member.result, node) for member in members)
            sums = found.sums.values()
            totals = set(carries.values())
            left |= {flat.outputs.index(e.result): e for e in sums if flat.can_leave(e, totals)}
            if failed := totals - totals_among(left):
                return steps, left, failed
            carries = {}
            here = [flat.placed(each) for each in sums if not flat.can_leave(each, totals)]
            steps += self._reduce([(nodes[each.result], each) for each in here], flat.around)
            remaining = later
        return steps, left, set()

    def _steps(self, node: Node, flat: _Flat) -> tuple[list[Step], tuple[Member, ...]]:
        """Return the steps of an equation that is no sum to compress, and the sums it leaves."""
        if not node.holds_target:
            self.exact += _kept(node.sums, node.equation, flat.around)
            self.exact += self._kept_inside(node.traced, flat.around)
            return [evaluate(node)], ()
        programs = []
        steps: list[Step] = []
        stacked: dict[int, WorkerAxis] = {}
        inputs: list[Key] = list(node.inputs)
        outputs: list[Key] = list(node.outputs)
        members: list[Member] = []
        parts = inner.parts_of(node.equation)
        for part, traced in zip(parts, node.traced.programs, strict=True):
            input_specs, output_specs = _specs_inside(part, node, flat.placement)
            schedule = self.schedule(
                traced,
                dataclasses.replace(
                    flat.around.of_part(part),
                    carried=part.carried,
                    leaving=part.leaving,
                    shapes=list(map(equations.shape_of, node.equation.outvars)),
                    totals=[
                        i for i in part.totals if node.traced.inputs[part.carried[i]].number == 0
                    ],
                    input_specs=input_specs,
                    output_specs=output_specs,
                ),
            )
            programs.append(schedule)
            for i, member in schedule.left.items():
                result = node.outputs[i]
                if i in part.carried:
                    place = part.carried[i]
                    steps.append(_first_terms(inputs[place], result, member))
                    inputs[place] = FirstTerms(result)
                elif part.stacks and member.workers is not None:
                    stacked[i] = member.workers
                outputs[i] = SumTerms(result)
                shape = equations.shape_of(node.equation.outvars[i])  # of all turns of a loop
                if whole := behind(self._selection, member, shape):
                    members.append(dataclasses.replace(whole, operand=outputs[i], result=result))
        step = Enter(
            node.equation,
            node.traced.scopes,
            tuple(inputs),
            tuple(outputs),
            tuple(programs),
            Messages.of(node.equation),
            stacked,
        )
        return [*steps, step], tuple(members)

    def _kept_inside(self, traced: TracedEquation, around: Surroundings) -> Iterator[KeptSum]:
        """Yield the sums inside of an equation, which all stay as they are."""
        parts = inner.programs_of(traced.equation)
        for part, program in zip(parts, traced.programs, strict=True):
            within = around.of_part(part)
            for each in program.equations:
                yield from _kept(self._reader.choices(each), each.equation, within)
                yield from self._kept_inside(each, within)

    def _reduce(self, sums: Sequence[tuple[Node, Member]], around: Surroundings) -> Iterator[Step]:
        """Yield a group for each kind of sums with a large one; others stay as they are."""
        kinds: dict[Any, list[tuple[Node, Member]]] = {}
        for node, member in sums:
            kinds.setdefault(member.kind, []).append((node, member))
        for of_kind in kinds.values():
            members = tuple(member for _, member in of_kind)
            if any(member.why_exact is None for member in members):
                sizes = {**equations.explicit_sizes(of_kind[0][0].equation), **around.sizes}
                if (workers := members[0].workers) is not None:
                    sizes |= {workers.axis: workers.count}
                number, managed = self._num_groups, around.automatic(workers)
                yield Reduce(members, number, around.times, sizes, around.mesh, managed)
                self._num_groups += 1
                continue
            for node, member in of_kind:
                choice = member.description, member.why_exact
                self.exact += _kept([choice], node.equation, around)
            here = {id(node): node for node, each in of_kind if is_of(node, each)}
            if moved := tuple(each for node, each in of_kind if not is_of(node, each)):
                yield SumExactly(moved)
            nodes = here
            yield from map(evaluate, nodes.values())


def _kept(choices: Sequence[Choice], equation: Equation, around: Surroundings) -> Iterator[KeptSum]:
    """Yield the sums of an equation that stay as they are."""
    for description, why in choices:
        has_parts = equation.params.get("axis_index_groups") is not None or around.automatic()
        sizes = {**equations.explicit_sizes(equation), **around.sizes}
        if is_over_rows(equation):
            sizes |= equation.params["mesh"].shape
        yield KeptSum(description, why, around.times, None if has_parts else sizes)


def _first_terms(first: Key, result: Value, member: Member) -> Evaluate:
    """Return the step that makes the terms with which a total of turns begins, from its zeros."""
    axes, workers = member.description.axes, member.workers
    if workers is not None:
        return Evaluate(
            lambda zero: [unreduced.zeros(zero, workers)], (first,), (FirstTerms(result),)
        )

    def varying(*zeros: Any) -> Sequence[Any]:
        return [compat.vary_over(zero, axes) for zero in zeros]

    return Evaluate(varying, (first,), (FirstTerms(result),))


def _specs_inside(
    part: inner.InnerProgram, node: Node, placement: Placement
) -> tuple[dict[int, PartitionSpec], dict[int, PartitionSpec]]:
    """Return the specs of inputs and outputs of a program of an equation that are known.

    Those of parts of an array, as in a turn of a loop, are not.
    """
    program, _ = equations.opened(part.program)

    def known(
        atoms: Sequence[Any], inside: Sequence[Any], values: Sequence[Key]
    ) -> dict[int, PartitionSpec]:
        return {
            i: spec
            for i, spec in placement.specs(values).items()
            if equations.shape_of(atoms[i]) == equations.shape_of(inside[i])
        }

    given = [(node.equation.invars[i], node.inputs[i]) for i in part.inputs or ()]
    before = known([atom for atom, _ in given], program.invars, [key for _, key in given])
    after = known(node.equation.outvars, program.outvars, node.outputs) if part.has_outputs else {}
    return {**before, **part.input_specs}, {**after, **part.output_specs}


def _product(*times: int | None) -> int | None:
    known = [each for each in times if each is not None]
    return math.prod(known) if len(known) == len(times) else None
