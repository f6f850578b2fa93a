"""Steps of a schedule: equations, as they are or around other programs, and sums in groups."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax import lax
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._collectives.halves import AllGather, ReduceScatter
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._inputs.shards import names_of, unknown_specs
from dynamiq_jax._rewriting import unreduced
from dynamiq_jax._rewriting.nodes import Node, StepProgram, Value, Variable
from dynamiq_jax._rewriting.rows import WorkerAxis
from dynamiq_jax._rewriting.sums import Operation, Sum, is_over_rows
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.equations import Equation


class KeptSum(NamedTuple):
    """Sum that stays as it is, in no group."""

    description: Sum
    why: str | None  # it stays exact
    times: int | None  # that it runs in one call of the step; None if that is not known
    # Of the axes around it, by name. None: it is over a part of an axis, or beside axes over which
    # the compiler splits its terms.
    sizes: Mapping[str, int] | None


# Messages between workers that an equation sends. Its place among others then counts. Those of one
# sum over rows are where the compiler places it. A loop begins when all that it carries is there.
Messages = Literal["none", "of rows", "once", "in a loop"]


def messages_of(equation: Equation) -> Messages:
    """Return the messages that an equation sends."""
    if not equations.collective_axes(equation):
        return "none"
    if is_over_rows(equation):
        return "of rows"
    return "in a loop" if equations.is_loop(equation) else "once"


@dataclasses.dataclass(frozen=True)
class Member:
    """Sum of a group."""

    description: Sum
    why_exact: str | None  # None: compressed
    operand: Value
    result: Variable
    params: Mapping[str, Any]  # of its equation
    spec: PartitionSpec | None = None  # over axes that the compiler manages; None: not known
    placed: PartitionSpec | None = None  # of its result, if it is sent in smaller parts
    accumulates: frozenset[int] = frozenset()  # carried outputs of a loop that are among its terms

    @property
    def typed_spec(self) -> PartitionSpec:
        """Spec of its terms over explicit axes, as a part of their type."""
        terms = self.result if self.is_moved else self.operand
        return equations.typed_spec(terms.var) if isinstance(terms, Variable) else PartitionSpec()

    @property
    def kind(self) -> Any:
        """Everything that the sums of a group share."""
        layout = [
            self.params.get(name) for name in ("scatter_dimension", "all_gather_dimension", "tiled")
        ]
        is_unreduced = "dst_sharding" in self.params
        each = self.description
        return each.operation, each.axes, self.workers, is_unreduced, *layout

    @property
    def workers(self) -> WorkerAxis | None:
        """The workers of a sum that the compiler places; None of one over a manual axis."""
        workers: WorkerAxis | None = self.params.get("workers")
        return workers

    def scattered(self, dimension: int) -> "Member":
        """Return the sum of which each worker gets its part of a dimension.

        That dimension is sent first, so that sums with parts of any dimension are one group.
        """
        described = dataclasses.replace(self.description, operation="psum_scatter")
        params = {**self.params, "scatter_dimension": 0, "tiled": True, "part": dimension}
        return dataclasses.replace(self, description=described, params=params)

    def split_over(self, sizes: Mapping[str, int]) -> "Member":
        """Return the sum with a spec that splits it over fast axes of these sizes, too.

        Otherwise each device of a host would send the whole sum to the other hosts.
        """
        spec, shape = self.spec or PartitionSpec(), self.description.shape
        used = {name for dimension in spec for name in names_of(dimension)}
        fast = tuple(name for name in sizes if name not in used)
        parts = math.prod(sizes[name] for name in fast)
        dimensions = [*spec, *[None] * (len(shape) - len(spec))]
        for dim, size in enumerate(shape):
            is_free = dimensions[dim] is None and dim != self.part
            if parts > 1 and is_free and size % parts == 0:
                split = PartitionSpec(*dimensions[:dim], fast, *dimensions[dim + 1 :])
                placed = self.spec if self.part is None else None
                return dataclasses.replace(self, spec=split, placed=placed)
        return self

    @property
    def part(self) -> int | None:
        """Dimension of the result that is split over the workers; None: all have all of it."""
        part: int | None = self.params.get("part")
        return part

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of the terms as they are sent."""
        return self._as_sent(self.description.shape)

    def sent_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return the spec of the terms as they are sent."""
        missing = len(self.description.shape) - len(spec)
        padded = [*spec, *[None] * missing]
        return spec if self.part is None else PartitionSpec(*self._as_sent(padded))

    def _as_sent(self, dimensions: Sequence[Any]) -> tuple[Any, ...]:
        if self.part is None:
            return tuple(dimensions)
        return (dimensions[self.part], *dimensions[: self.part], *dimensions[self.part + 1 :])

    @property
    def is_moved(self) -> bool:
        """True if other equations make its terms than those of the program around it."""
        return isinstance(self.operand, Variable) and self.operand.role != "value"


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Step of a schedule: a function of values, such as an equation as it is."""

    function: Callable[..., Sequence[Any]]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    messages: Messages = "none"
    # Programs inside that hold compressed sums. In front of the values, the function takes these
    # programs as functions, and the key.
    programs: tuple["EvaluationSchedule", ...] = ()


@dataclasses.dataclass(frozen=True)
class Reduce:
    """Step of a schedule: one compressed collective, of sums of one kind."""

    members: tuple[Member, ...]
    over: tuple[str, ...]  # axes of the collective, slowest first; those of its sums may be more
    around: StepProgram  # in which it is
    sizes: Mapping[str, int]  # of the axes around it, by name
    automatic: Mapping[str, int]  # of those that the compiler manages
    number: int  # of the group in the whole program

    def by_path(self, values: Iterable[Any]) -> collections.OrderedDict[str, Any]:
        """Return a tree of values, one for each sum, by the paths of the sums in a policy.

        The leaves are in the order of the program. JAX would sort those of a dictionary.
        """
        return collections.OrderedDict((f"sum_{i}", value) for i, value in enumerate(values))

    @property
    def operation(self) -> Operation:
        """Operation of its sums."""
        return self.members[0].description.operation

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of its sums."""
        return self.members[0].description.axes

    @property
    def workers(self) -> WorkerAxis | None:
        """Workers of its sums, if the compiler places them."""
        return self.members[0].workers

    def specs(self, request: Request) -> Any:
        """Return the specs of the terms: one for all, those of each leaf, or None.

        Raises:
          MistakeError: the compiler manages an axis, and the spec of a term to compress is neither
            given nor known.
        """
        members, specs, whole = self.members, request.compression.specs, PartitionSpec()
        if callable(specs):
            return self.by_path(each.sent_spec(specs(each.description)) for each in members)
        if specs is not None:
            return specs
        if self.workers is not None:  # the compiler gathers terms that are split otherwise
            return self.by_path(each.sent_spec(each.spec or whole) for each in members)
        if not self.automatic:
            typed = [each.typed_spec for each in members]
            return self.by_path(typed) if any(spec != whole for spec in typed) else None
        if any(each.spec is None for each in members if each.why_exact is None):
            raise unknown_specs(self.automatic)
        return self.by_path(each.spec for each in members)

    def collective(self, axes: Axes) -> Collective:
        """Return the collective of the group over axes, all or some of those of its sums."""
        params = self.members[0].params
        last_first = self.workers is None  # terms of rows are in the order of the program
        match self.operation:
            case "psum":
                return AllReduce(axes, last_first=last_first)
            case "psum_scatter":
                return ReduceScatter(
                    axes, params["scatter_dimension"], params["tiled"], last_first=last_first
                )
            case "all_gather":
                return AllGather(axes, params["all_gather_dimension"], params["tiled"])


Step = Compute | Reduce


@dataclasses.dataclass(frozen=True)
class EvaluationSchedule:
    """Steps that evaluate a program."""

    steps: tuple[Step, ...]
    inputs: tuple[Variable, ...]
    constants: tuple[tuple[Variable, Any], ...]
    outputs: tuple[Value, ...]  # with terms in place of the sums that are left to the caller
    left: Mapping[int, Member]  # sums that are left to the caller, by the number of the output


def member_of(node: Node) -> Member:
    """Return the sum that an equation is."""
    assert node.sum is not None
    (result,) = node.outputs
    operand = result.terms if is_over_rows(node.equation) else node.inputs[0]
    return Member(node.sum, node.why_exact, operand, result, node.equation.params)


def is_of(node: Node, member: Member) -> bool:
    """Return whether a sum is that of an equation, with the terms that the equation has."""
    return not member.is_moved or (is_over_rows(node.equation) and member == member_of(node))


def terms_of(node: Node) -> Compute:
    """Return the step that makes the terms of a contraction of rows, one for each worker."""
    function = node.equation.params["parts"]

    def terms(*values: Any) -> Sequence[Any]:
        return function(*equations.with_literals(node.equation, values))

    return Compute(terms, node.variables, (node.outputs[0].terms,))


def first_terms(zero: Value, total: Variable, member: Member) -> Compute:
    """Return the step that makes the terms with which the total of a loop's turns begins, from
    zero. A turn adds those of `member`.
    """
    axes, workers = member.description.axes, member.workers

    def terms(zero: Any) -> Sequence[Any]:
        return [compat.vary_over(zero, axes) if workers is None else unreduced.zeros(zero, workers)]

    return Compute(terms, (zero,), (total._replace(role="first terms"),))


def terms_of_turns(stacked: Variable, workers: WorkerAxis) -> Compute:
    """Return the step that makes the terms of a sum from those that a loop has stacked."""

    def terms(turns: Any) -> Sequence[Any]:
        return [unreduced.of_all_turns(turns, workers)]

    return Compute(terms, (stacked,), (stacked.terms,))


def summed_exactly(members: Sequence[Member]) -> Compute:
    """Return the step of sums of one kind that stay exact, of terms that other equations make."""
    results = tuple(each.result for each in members)
    axes, workers = members[0].description.axes, members[0].workers

    def totals(*terms: Any) -> Sequence[Any]:
        if workers is None:
            return lax.psum(terms, axes)
        pairs = zip(terms, results, strict=True)
        return [unreduced.total(each, result.var, workers) for each, result in pairs]

    messages: Messages = "once" if workers is None else "none"
    operands = tuple(each.operand for each in members)
    return Compute(totals, operands, results, messages)


def as_it_is(node: Node) -> Compute:
    """Return the step of an equation as it is, or of the zeros that it sums."""
    if node.is_zeros:
        results = node.equation.outvars

        def zeros() -> Sequence[Any]:
            return list(map(equations.zeros_like, results))

        return Compute(zeros, (), node.outputs)
    outputs = zip(node.equation.outvars, node.outputs, strict=True)
    return Compute(
        functools.partial(equations.evaluate, node.equation),
        node.variables,
        tuple(value for var, value in outputs if equations.is_used(var)),
        messages_of(node.equation),
    )
