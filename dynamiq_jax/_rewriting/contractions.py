"""Sums that the compiler places: contractions of rows, which it splits over workers.

In a step with shardings alone, no equation sums over workers. Where rows are split over an axis,
each equation that contracts them is such a sum. It becomes an equation of the primitive
`sum_over_rows`, which computes the same, and is a sum for whoever reads the program.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._rewriting import unreduced
from dynamiq_jax._rewriting.inner import programs_of
from dynamiq_jax._rewriting.nodes import StepProgram
from dynamiq_jax._rewriting.rows import REDUCTIONS, Row, Rows, WorkerAxis, follow, rows_of_spec
from dynamiq_jax._rewriting.sums import sum_over_rows
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


def workers_of(axis: str, shardings: Sequence[Any], program: Any) -> WorkerAxis | None:
    """Return the workers of a program, along an axis of a mesh that is not manual; None if neither
    shardings of inputs nor the program name such a mesh.
    """
    around = jax.sharding.get_abstract_mesh()
    placed = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    # That of the surroundings is the one in which the step is traced.
    for mesh in itertools.chain([around], placed, _meshes(program)):
        if axis in mesh.axis_names and axis not in around.manual_axes:
            return WorkerAxis(axis, mesh)
    return None


def _meshes(program: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes that a program names, and those of arrays that it closes over."""
    opened, constants = equations.opened(program)
    given = list(map(_sharding_of, constants))
    for equation in opened.eqns:
        params = equation.params
        given += map(_sharding_of, equation.invars)
        if equation.primitive.name != "shard_map":
            given += (params.get("sharding"), *params.get("in_shardings", ()))
    yield from (each.mesh for each in given if isinstance(each, NamedSharding))
    for equation in opened.eqns:
        for inside in equations.programs_in(equation):
            yield from _meshes(inside)


def _sharding_of(constant: Any) -> Any:
    """Return the sharding of a constant of a program, or of a literal; None if it has none."""
    return getattr(getattr(constant, "val", constant), "sharding", None)


class RowHint(NamedTuple):
    """Rows of a value, as far as they are known."""

    dims: Rows = ()
    lost: str | None = None  # why they are no longer known
    is_alike: bool = False  # whether it is one number, such as the gradient of a mean


def hint_of_spec(spec: Any, workers: WorkerAxis) -> RowHint:
    """Return the rows that a spec splits over the workers.

    Not those that it splits over another axis first: parts of them would move between workers.
    """
    dims = rows_of_spec(spec, workers.axis)
    names = names_of(spec[dims[0]]) if dims else ()
    for name in itertools.takewhile(lambda name: name != workers.axis, names):
        if workers.mesh.shape[name] > 1:
            return RowHint(
                lost=f"its rows are split over {name!r} first: give {workers.axis!r} the first "
                f"place in that part of their PartitionSpec, {names}"
            )
    return RowHint(dims)


_MOST_ROUNDS = 4  # until the rows that a loop carries are those that it returns


class Marker:
    """Marks the contractions of rows of a program, and of those inside."""

    def __init__(self, workers: WorkerAxis):
        self._workers = workers
        self._is_explicit = workers.axis in workers.mesh.explicit_axes
        self._marked: dict[Any, tuple[Any, list[RowHint]]] = {}

    def program(self, program: Any, rows: Sequence[RowHint]) -> tuple[Any, list[RowHint]]:
        """Return a program with marked contractions, and the rows of its outputs, given those of
        its inputs.
        """
        place = id(program), tuple(rows)
        if place not in self._marked:
            self._marked[place] = self._mark(program, rows)
        return self._marked[place]

    def _mark(self, program: Any, rows: Sequence[RowHint]) -> tuple[Any, list[RowHint]]:
        opened, constants = equations.opened(program)
        closed_over = map(
            self._typed, opened.constvars, map(self._placed, map(_sharding_of, constants))
        )
        known = dict(zip(opened.constvars, closed_over, strict=True))
        known.update(zip(opened.invars, rows, strict=True))

        def rows_of(atoms: Sequence[Any]) -> list[RowHint]:
            return [
                known.get(a, RowHint())
                if equations.is_variable(a)
                else self._placed(_sharding_of(a))
                for a in atoms
            ]

        marked = []
        for equation in opened.eqns:
            each, after = self._equation(equation, rows_of(equation.invars))
            marked.append(each)
            typed = map(self._typed, equation.outvars, after)
            known.update(zip(equation.outvars, typed, strict=True))
        result = opened.replace(eqns=marked)
        if isinstance(program, ClosedJaxpr) and program is not opened:
            result = ClosedJaxpr(result, constants)
        return result, rows_of(opened.outvars)

    def _typed(self, variable: Any, rows: RowHint) -> RowHint:
        """Return the rows of a value. On explicit axes, its type has those that were lost."""
        if rows.dims or not self._is_explicit:
            return rows
        sharding = getattr(variable.aval, "sharding", None)
        typed = hint_of_spec(getattr(sharding, "spec", ()), self._workers)
        return typed if typed.dims else rows

    def _equation(self, equation: Equation, rows: list[RowHint]) -> tuple[Equation, list[RowHint]]:
        """Return an equation with marked contractions, and the rows of its outputs."""
        if equation.primitive.name in ("sharding_constraint", "reshard"):
            return equation, [self._constrained(equation, rows[0])]
        parts = programs_of(equation)
        if not parts or any(part.inputs is None for part in parts):
            return self._plain(equation, rows)
        if any(self._workers.axis in part.sizes or self._is_elsewhere(part) for part in parts):
            specs = equation.params["out_specs"]
            return equation, [hint_of_spec(spec, self._workers) for spec in specs]
        rows = self._all_placed(equation.params.get("in_shardings"), rows)
        marked, of_each = {}, []
        for part in parts:
            if part.has_outputs:
                marked[id(part.traced)], after = self._part(equation, part, rows)
                of_each.append(after)
        results = [
            next((each for each in of_output if each.dims), of_output[0])
            for of_output in zip(*of_each, strict=True)
        ]
        results = self._all_placed(equation.params.get("out_shardings"), results)
        return equations.with_programs(equation, marked), results

    def _is_elsewhere(self, part: StepProgram) -> bool:
        """Return whether a program runs in another mesh, with another number of workers."""
        shape = {} if part.mesh is None else part.mesh.shape
        return shape.get(self._workers.axis, self._workers.count) != self._workers.count

    def _part(
        self, equation: Equation, part: StepProgram, rows: Sequence[RowHint]
    ) -> tuple[Any, list[RowHint]]:
        """Return a marked program of an equation, and the rows of the equation's results.

        Values of a loop that begin without rows, such as zeros, have those of the turn before.
        """
        first = len(rows) if part.first_of_turn is None else part.first_of_turn
        values = [rows[number] for number in part.inputs or ()]
        values[first:] = [_of_turn(equation, each) for each in values[first:]]
        for _ in range(_MOST_ROUNDS):
            before = list(values)
            program, after = self.program(part.traced, values)
            for output, place in part.carried.items():
                values[place] = values[place] if values[place].dims else after[output]
            if values == before:
                break
        by = 0 if part.first_of_turn is None else 1
        return program, [
            values[part.carried[i]] if i in part.carried else _shifted(each, by)
            for i, each in enumerate(after)
        ]

    def _plain(self, equation: Equation, rows: list[RowHint]) -> tuple[Equation, list[RowHint]]:
        """Mark an equation that holds no program, if it contracts rows."""
        if _is_one_number(equation, rows):
            return equation, [RowHint(is_alike=True)] * len(equation.outvars)
        dims = [each.dims for each in rows]
        choices = (contraction(equation, each) for each in _with_rows_alike(equation, rows))
        if (split := next((each for each in choices if each is not None), None)) is not None:
            why = None
            shapes = map(equations.shape_of, equation.invars)
            rows_split = (s[d] for s, d in zip(shapes, split, strict=True) if d is not None)
            count = self._workers.count
            if not all(isinstance(n, int) and n and n % count == 0 for n in rows_split):
                why = f"its rows do not split evenly among {count} workers"
            return self._sum(equation, None if why else split, why), [RowHint()]
        lost = next((each.lost for each in rows if each.lost), None)
        if lost and may_contract(equation, dims, [each.lost is not None for each in rows]):
            return self._sum(equation, None, lost), [RowHint()]
        if lost is None and any(dims) and equation.primitive.name not in _ENDS:
            lost = (
                f"its rows are not followed through {equation.primitive.name!r} of "
                f"{equations.place(equation) or 'an unknown line'}: give the result "
                "jax.lax.with_sharding_constraint"
            )
        return equation, [
            RowHint(each) if each else RowHint(lost=lost) for each in follow(equation, dims)
        ]

    def _sum(self, equation: Equation, split: list[Row] | None, why: str | None) -> Equation:
        """Return a contraction as a sum, of which each worker takes a part along the dimensions
        `split` of the operands; or why it is left to the compiler.
        """
        params = {
            "equation": equation,
            "parts": split and unreduced.parts(equation, split, self._workers),
            "why_exact": why,
            "axes": (self._workers.axis,),
            "workers": self._workers,
        }
        return equation.replace(primitive=sum_over_rows, params=params)

    def _constrained(self, equation: Equation, rows: RowHint) -> RowHint:
        """Rows lie where a sharding puts them."""
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return rows
        if equation.primitive.name == "reshard" and self._workers.axis in sharding.mesh.auto_axes:
            return rows  # into a part of the program where the compiler manages the axis
        spec = [*sharding.spec, *[None] * len(equations.shape_of(equation.outvars[0]))]
        moved = hint_of_spec(spec, self._workers)
        kept = (dim for dim in rows.dims if spec[dim] is PartitionSpec.UNCONSTRAINED)
        return moved if moved.dims or moved.lost else RowHint(tuple(kept))

    def _placed(self, sharding: Any, otherwise: RowHint = RowHint()) -> RowHint:
        """Return the rows of a value with a sharding, where one is given."""
        is_given = isinstance(sharding, NamedSharding)
        return hint_of_spec(sharding.spec, self._workers) if is_given else otherwise

    def _all_placed(self, shardings: Sequence[Any] | None, rows: list[RowHint]) -> list[RowHint]:
        """Return the rows of values with the shardings of a function, where these are given."""
        given = shardings or [None] * len(rows)
        return [self._placed(*pair) for pair in zip(given, rows, strict=True)]


def _is_one_number(equation: Equation, rows: Sequence[RowHint]) -> bool:
    """Return whether an equation makes one number in all places of its result, as a hint."""
    shapes = list(map(equations.shape_of, equation.invars))
    if equation.primitive.name == "broadcast_in_dim":
        return shapes[:1] == [()]
    alike = [shape for shape, each in zip(shapes, rows, strict=True) if each.is_alike]
    are_others_numbers = shapes.count(()) + len(alike) == len(shapes)
    results = map(equations.shape_of, equation.outvars[:1])  # a callback may have none
    return are_others_numbers and any(shape in alike for shape in results)


def _with_rows_alike(equation: Equation, rows: Sequence[RowHint]) -> Iterator[list[Rows]]:
    """Yield the rows of operands as they are known. Then, for each operand that is one number, or
    that all workers have while another one has rows, yield them with each of its dimensions as its
    rows.
    """
    dims = [each.dims for each in rows]
    yield dims
    for i, each in enumerate(rows):
        is_whole = not each.dims and each.lost is None and any(dims)
        if each.is_alike or is_whole:
            rank = len(equations.shape_of(equation.invars[i]))
            yield from ([*dims[:i], (dim,), *dims[i + 1 :]] for dim in range(rank))


def _shifted(rows: RowHint, by: int) -> RowHint:
    """Return rows behind other dimensions, or without the first dimension."""
    return rows._replace(dims=tuple(d + by for d in rows.dims if d + by >= 0))


def _of_turn(equation: Equation, rows: RowHint) -> RowHint:
    """Return the rows that each turn of a loop takes."""
    of_turn = _shifted(rows, -1)
    if not rows.dims or of_turn.dims:
        return of_turn
    where = equations.place(equation) or "an unknown line"
    why = (
        f"its rows are the turns of {equation.primitive.name!r} of {where}: split the rows of each "
        "turn, by jax.lax.with_sharding_constraint on what the loop takes"
    )
    return of_turn._replace(lost=why)


def contraction(equation: Equation, rows: Sequence[Rows]) -> list[Row] | None:
    """Return the dimension of each operand along which the workers do parts of a contraction.

    The result of the equation is the sum of its results for the parts of each worker. Both factors
    of a product have to hold rows: one alone may be a parameter that is split over the same axis.
    A result that holds rows is no sum.

    None of an operand: each worker takes all of it. No list: the equation contracts no rows.
    """
    rule = _CONTRACTIONS.get(equation.primitive.name)
    if rule is None:
        return None
    choices = itertools.product(*(each or (None,) for each in rows))  # one dimension of each
    found = next(filter(None, (rule(equation, each) for each in choices)), None)
    if found is None:
        return None
    # Rows that the contraction leaves, where all rows meet all rows.
    others = [
        tuple(dim for dim in dims if dim != each) if len(dims) > 1 else ()
        for dims, each in zip(rows, found, strict=True)
    ]
    return None if any(follow(equation, others)) else found


def may_contract(equation: Equation, rows: Sequence[Rows], are_lost: Sequence[bool]) -> bool:
    """Return whether an equation may contract rows, which are lost of an operand or of both."""
    match equation.primitive.name:
        case "dot_general":
            pairs = list(zip(*equation.params["dimension_numbers"][0], strict=True))
        case "conv_general_dilated":
            numbers = equation.params["dimension_numbers"]
            pairs = [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
        case "scatter-add":  # the gradient of an embedding
            return not rows[0] and (are_lost[1] or are_lost[2])
        case "reduce_sum":  # the gradient of a bias
            return are_lost[0] and 0 in equation.params["axes"]
        case _:
            return False
    return (bool(pairs) and all(are_lost)) or any(
        (are_lost[1] and first in rows[0]) or (are_lost[0] and second in rows[1])
        for first, second in pairs
    )


def _contracted_product(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    (left, right), _ = equation.params["dimension_numbers"]
    pairs = zip(left, right, strict=True)
    return next(([*pair] for pair in pairs if pair == (rows[0], rows[1])), None)


def _contracted_convolution(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of a kernel: rows are the features of both operands, in one group."""
    numbers = equation.params["dimension_numbers"]
    features = [numbers.lhs_spec[1], numbers.rhs_spec[1]]
    in_groups = equation.params["feature_group_count"] > 1
    return features if not in_groups and features == [*rows] else None


def _contracted_sum(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    return [*rows] if len(rows) == 1 and rows[0] in equation.params["axes"] else None


def _contracted_scatter(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of an embedding: rows of updates at places in an operand without rows."""
    numbers = equation.params["dimension_numbers"]
    _, places, updates = equation.invars
    dim = rows[1]
    last = len(equations.shape_of(places)) - 1
    if rows[0] is not None or dim is None or dim >= last:
        return None
    if dim in numbers.scatter_indices_batching_dims:
        return None
    batch = [
        d for d in range(len(equations.shape_of(updates))) if d not in numbers.update_window_dims
    ]
    return [None, dim, batch[dim]] if rows[2] in (None, batch[dim]) else None


def _contracted_groups(equation: Equation, rows: Sequence[Row]) -> list[Row] | None:
    """The gradient of one matrix for each group of rows. A parameter has no groups of rows."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left, right), _ = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions[0]
    if ragged not in left:
        return None
    pair = [ragged, right[list(left).index(ragged)]]
    holds = any(dim == each for dim, each in zip(pair, rows[:2], strict=True))
    return [*pair, None] if holds else None


_CONTRACTIONS: dict[str, Callable[[Equation, Sequence[Row]], list[Row] | None]] = {
    "conv_general_dilated": _contracted_convolution,
    "dot_general": _contracted_product,
    "psum": _contracted_sum,  # over a dimension, in a jax.vmap
    "ragged_dot_general": _contracted_groups,
    "reduce_sum": _contracted_sum,
    "scatter-add": _contracted_scatter,
}
# Results of these may have no rows although nothing is lost.
_ENDS = REDUCTIONS | _CONTRACTIONS.keys()
