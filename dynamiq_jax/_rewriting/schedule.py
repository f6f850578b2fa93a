"""Schedule of a traced program: which sums are one group, and when each equation is evaluated.

Sums wait, and so does each equation that needs one of them, until every other equation is
evaluated. Then all waiting sums of one kind are a group, which is one compressed collective. So
the sums of a tree share buckets, wherever a step uses the first of them.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._collectives.all_gather import AllGather
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._collectives.reduce_scatter import ReduceScatter
from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.nodes import (
    Choice,
    Key,
    Node,
    Reader,
    SumTerms,
    Value,
    keep_exact,
    key_of,
)
from dynamiq_jax._rewriting.sums import Selection, Sum
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


@dataclasses.dataclass(frozen=True)
class Member:
    """Sum of a group."""

    description: Sum
    why_exact: str | None  # None: compressed
    operand: Key
    result: Value
    params: Mapping[str, Any]  # of its equation


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Step of a schedule: an equation as it is."""

    function: Callable[..., Sequence[Any]]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    axes: tuple[str, ...]  # over which it is a sum or a gather


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Step of a schedule: one compressed collective, of sums of one kind."""

    members: tuple[Member, ...]
    number: int  # of the group in the whole program
    times: int | None  # that it runs in one call of the step; None if that is not known
    sizes: Mapping[str, int]  # of the axes around it, by name

    def collective(self, axes: Axes) -> Collective:
        """Return the collective of the group over axes, all or some of those of its sums."""
        params = self.members[0].params
        match self.members[0].description.operation:
            case "psum":
                return AllReduce(axes)
            case "psum_scatter":
                return ReduceScatter(axes, params["scatter_dimension"], params["tiled"])
            case "all_gather":
                return AllGather(axes, params["all_gather_dimension"], params["tiled"])


@dataclasses.dataclass(frozen=True)
class Enter:
    """Step of a schedule: an equation that holds programs with compressed sums."""

    equation: Equation
    scopes: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]  # `SumTerms` of sums that are left to this program
    programs: tuple["EvaluationSchedule", ...]


@dataclasses.dataclass(frozen=True)
class EvaluationSchedule:
    """Steps that evaluate a program."""

    steps: tuple[Evaluate | Reduce | Enter, ...]
    inputs: tuple[Value, ...]
    constants: tuple[tuple[Value, Any], ...]
    outputs: tuple[Key, ...]  # with terms in place of the sums that are left to the caller
    left: Mapping[int, Member]  # sums that are left to the caller, by the number of the output

    def groups(self) -> Iterator[Reduce]:
        """Yield the groups of this program and of those inside."""
        for step in self.steps:
            if isinstance(step, Reduce):
                yield step
            elif isinstance(step, Enter):
                for program in step.programs:
                    yield from program.groups()


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Everything around a program that its schedule depends on."""

    scopes: str = ""  # names of the scopes
    times: int | None = 1  # that it runs in a call of the step; None if that is not known
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of manual axes, by name
    needed_outputs: Collection[int] = ()  # with which the backward pass of the caller goes on
    # Outputs that the next turn of a loop takes as inputs, by the number of the output.
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)
    # Whether the caller can do the sum that is an output, by the number of the output.
    may_leave: Callable[[int], bool] = lambda output: False


class Scheduler:
    """Makes the schedule of a program, and of those inside."""

    def __init__(self, selection: Selection):
        self.exact: list[Choice] = []  # sums that stay as they are
        self._reader = Reader(selection)
        self._groups = itertools.count()

    def schedule(self, program: Any, around: Surroundings) -> EvaluationSchedule:
        """Schedule a traced program."""
        opened, constants = equations.opened(program)
        call = self._reader.next_call()
        names: dict[Value, Key] = {}
        is_mapped = bool(around.sizes)
        nodes = list(self._reader.flat(opened, call, names, around.scopes, is_mapped))
        inputs = tuple(Value(variable, call) for variable in opened.invars)
        outputs = [key_of(out, call, names) for out in opened.outvars]
        keep_exact(
            nodes,
            {outputs[i] for i in around.needed_outputs},
            {outputs[i]: inputs[j] for i, j in around.carried.items()},
        )
        steps, left = self._in_order(nodes, outputs, around)
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

    def _in_order(
        self, nodes: Sequence[Node], outputs: Sequence[Key], around: Surroundings
    ) -> tuple[list[Evaluate | Reduce | Enter], dict[int, Member]]:
        """Return the steps of a program, and the sums that are left to its caller, by output."""
        uses = collections.Counter(key for node in nodes for key in node.inputs)
        uses.update(outputs)
        place = {key: i for i, key in enumerate(outputs) if uses[key] == 1}
        steps: list[Evaluate | Reduce | Enter] = []
        left: dict[int, Member] = {}
        remaining = list(nodes)
        while remaining:
            later: list[Node] = []
            waiting: set[Key] = set()
            sums: dict[Key, tuple[Node, Member]] = {}  # by their results
            order_matters = False
            for node in remaining:
                effects = equations.has_effects(node.equation)
                if waiting.intersection(node.inputs) or (effects and order_matters):
                    if moved := _in_front(node, sums, uses):
                        added, member = moved
                        steps.append(added)
                        for key in node.inputs:
                            sums.pop(key)
                        sums[member.result] = node, member
                    else:
                        later.append(node)
                        order_matters |= effects
                    waiting.update(node.outputs)
                    continue
                if node.is_target or node.may_join:
                    members = _members(node)
                else:
                    step, members = self._step(node, around)
                    steps.append(step)
                waiting.update(member.result for member in members)
                sums.update((member.result, (node, member)) for member in members)
            stay = {
                id(node) for node, member in sums.values() if not _can_leave(member, place, around)
            }
            leaving = [member for node, member in sums.values() if id(node) not in stay]
            left.update((place[member.result], member) for member in leaving)
            here = [(node, member) for node, member in sums.values() if id(node) in stay]
            steps += self._reduce(here, around)
            remaining = later
        return steps, left

    def _step(
        self, node: Node, around: Surroundings
    ) -> tuple[Evaluate | Enter, tuple[Member, ...]]:
        """Return the step of an equation that is no sum to compress, and the sums it leaves."""
        if not node.holds_target:
            inside = self._reader.inside(node.equation, node.scopes)
            self.exact += [*node.sums, *inside]
            return _evaluate(node), ()
        programs = []
        outputs: list[Key] = list(node.outputs)
        members: list[Member] = []
        for part in inner.parts_of(node.equation):
            schedule = self.schedule(
                part.program,
                Surroundings(
                    node.scopes,
                    _product(around.times, part.times),
                    {**around.sizes, **part.sizes},
                    node.needed if part.has_outputs else (),
                    part.carried,
                    part.may_leave,
                ),
            )
            programs.append(schedule)
            for i, member in schedule.left.items():
                outputs[i] = SumTerms(node.outputs[i])
                shape = equations.shape_of(node.equation.outvars[i])  # of all turns of a loop
                members.append(
                    dataclasses.replace(
                        member,
                        description=dataclasses.replace(member.description, shape=shape),
                        operand=outputs[i],
                        result=node.outputs[i],
                    )
                )
        step = Enter(node.equation, node.scopes, node.inputs, tuple(outputs), tuple(programs))
        return step, tuple(members)

    def _reduce(
        self, sums: Sequence[tuple[Node, Member]], around: Surroundings
    ) -> Iterator[Evaluate | Reduce]:
        """Yield a group for each kind of sums with a large one; others stay as they are."""
        kinds: dict[Any, list[tuple[Node, Member]]] = {}
        for node, member in sums:
            kinds.setdefault(_kind(member), []).append((node, member))
        for of_kind in kinds.values():
            members = tuple(member for _, member in of_kind)
            nodes = {id(node): node for node, _ in of_kind}
            is_large = any(member.why_exact is None for member in members)
            if is_large or any(node.holds_target for node in nodes.values()):
                sizes = {**equations.explicit_sizes(of_kind[0][0].equation), **around.sizes}
                yield Reduce(members, next(self._groups), around.times, sizes)
                continue
            self.exact += [(member.description, member.why_exact) for member in members]
            yield from map(_evaluate, nodes.values())


def _product(*times: int | None) -> int | None:
    known = [each for each in times if each is not None]
    return math.prod(known) if len(known) == len(times) else None


# Linear equations that may come before a sum in place of behind it: of one array, and of several.
_OF_ONE = {"reshape", "squeeze", "transpose"}
_OF_SEVERAL = {"add", "add_any"}


def _in_front(
    node: Node, sums: Mapping[Key, tuple[Node, Member]], uses: Mapping[Key, int]
) -> tuple[Evaluate, Member] | None:
    """Return the step of an equation of sums as one of their terms, and the sum of its results.

    So the gradients of a parameter that a loss uses several times are one sum.

    Args:
      node: equation that needs a sum.
      sums: sums that wait, by their results.
      uses: number of uses of each value.
    """
    name, keys = node.equation.primitive.name, node.inputs
    is_linear = name in _OF_SEVERAL or (name in _OF_ONE and len(keys) == 1)
    if not is_linear or any(key not in sums or uses[key] > 1 for key in keys):
        return None
    members = [sums[key][1] for key in keys]
    kinds = {(_kind(member), member.why_exact) for member in members}
    is_psum = members[0].description.operation == "psum"
    is_unreduced = "dst_sharding" in members[0].params  # linear equations have rules of their own
    if kinds != {(_kind(members[0]), None)} or not is_psum or is_unreduced:
        return None
    result = node.outputs[0]
    described = members[0].description
    shape = equations.shape_of(node.equation.outvars[0])
    operands = dict(zip(node.equation.invars, (member.operand for member in members), strict=True))
    step = Evaluate(
        equations.evaluated(node.equation), tuple(operands.values()), (SumTerms(result),), ()
    )
    member = dataclasses.replace(
        members[0],
        description=dataclasses.replace(described, shape=shape),
        operand=SumTerms(result),
        result=result,
    )
    return step, member


def _can_leave(member: Member, place: Mapping[Key, int], around: Surroundings) -> bool:
    """Return whether the caller of a program can do a sum of it: a result, and nothing else."""
    output = place.get(member.result)
    is_sum = member.description.operation == "psum"
    return is_sum and output is not None and around.may_leave(output)


def _kind(member: Member) -> Any:
    """Return everything that the sums of a group share."""
    return member.description.operation, member.description.axes, inner.layout(member.params)


def _members(node: Node) -> tuple[Member, ...]:
    return tuple(
        Member(description, why, operand, result, node.equation.params)
        for (description, why), operand, result in zip(
            node.sums, node.inputs, node.outputs, strict=True
        )
    )


def _evaluate(node: Node) -> Evaluate:
    keys = {
        variable: key
        for variable, key in zip(node.equation.invars, node.inputs, strict=True)
        if equations.is_variable(variable)
    }
    outputs = zip(node.equation.outvars, node.outputs, strict=True)
    return Evaluate(
        equations.evaluated(node.equation),
        tuple(keys.values()),
        tuple(key for variable, key in outputs if equations.is_used(variable)),
        node.sums[0][0].axes if node.sums else (),
    )
