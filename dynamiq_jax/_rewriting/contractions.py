"""Sums that the compiler places: contractions of rows, which it splits over workers.

In a step with shardings alone, no equation sums over workers. Where rows are split over an axis,
each equation that contracts them is such a sum. It becomes an equation of the primitive
`sum_over_rows`, which computes the same, and is a sum for whoever reads the program.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._rewriting.rows import Row, Rows, follow, rows_of_spec
from dynamiq_jax._rewriting.splits import contraction, ends, may_contract, splits_evenly
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


@dataclasses.dataclass(frozen=True)
class WorkerAxis:
    """Axis of a mesh over which the compiler splits rows, among one worker for each place."""

    axis: str
    mesh: Mesh | AbstractMesh

    @property
    def count(self) -> int:
        """Number of workers."""
        size: int = self.mesh.shape[self.axis]
        return size


def workers_of(axis: str, shardings: Sequence[Any], program: Any) -> WorkerAxis | None:
    """Return the workers of a program, along an axis of a mesh that is not manual; None if there
    is no such mesh.

    Args:
      axis: name of the axis.
      shardings: known shardings of inputs.
      program: traced program.
    """
    around = jax.sharding.get_abstract_mesh()
    placed = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    for mesh in itertools.chain(placed, [around], _meshes(program)):
        if axis in mesh.axis_names and axis not in around.manual_axes:
            return WorkerAxis(axis, mesh)
    return None


def _meshes(program: Any) -> Iterator[Mesh | AbstractMesh]:
    """Yield the meshes that a program names."""
    for equation in equations.opened(program)[0].eqns:
        params = equation.params
        if equation.primitive.name != "shard_map":
            given = (params.get("sharding"), *params.get("in_shardings", ()))
            yield from (each.mesh for each in given if isinstance(each, NamedSharding))
        for inside in equations.programs_in(equation):
            yield from _meshes(inside)


@dataclasses.dataclass(frozen=True)
class Lost:
    """Rows of a value that are no longer known."""

    why: str


@dataclasses.dataclass(frozen=True)
class Alike:
    """Rows of a value that is one number, such as the gradient of a mean."""


Known = Rows | Lost | Alike

sum_over_rows = Primitive("sum_over_rows")
sum_over_rows.def_abstract_eval(lambda *operands, equation, **params: equation.outvars[0].aval)


def _as_it_was(*operands: Any, equation: Equation, **params: Any) -> Any:
    return equations.bound(equation, operands)[0]


mlir.register_lowering(sum_over_rows, mlir.lower_fun(_as_it_was, multiple_results=False))

# Equations that call a program with their inputs, in their order.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
    *("custom_vjp_call_jaxpr", "eval_jaxpr", "remat2", "checkpoint"),
}
_MOST_ROUNDS = 4  # until the rows that a loop carries are those that it returns


class Marker:
    """Marks the contractions of rows of a program, and of those inside."""

    def __init__(self, workers: WorkerAxis):
        self._workers = workers
        self._marked: dict[Any, tuple[Any, list[Known]]] = {}

    def program(self, program: Any, rows: Sequence[Known]) -> tuple[Any, list[Known]]:
        """Return a program with marked contractions, and the rows of its outputs.

        Args:
          program: traced program.
          rows: rows of its inputs.
        """
        place = id(program), tuple(rows)
        if place not in self._marked:
            self._marked[place] = self._mark(program, rows)
        return self._marked[place]

    def _mark(self, program: Any, rows: Sequence[Known]) -> tuple[Any, list[Known]]:
        opened, constants = equations.opened(program)
        known: dict[Any, Known] = dict(zip(opened.invars, rows, strict=True))

        def rows_of(atoms: Sequence[Any]) -> list[Known]:
            return [known.get(a, ()) if equations.is_variable(a) else () for a in atoms]

        marked = []
        for equation in opened.eqns:
            each, after = self._equation(equation, rows_of(equation.invars))
            marked.append(each)
            known.update(zip(equation.outvars, after, strict=True))
        result = opened.replace(eqns=marked)
        if isinstance(program, ClosedJaxpr) and program is not opened:
            result = ClosedJaxpr(result, constants)
        return result, rows_of(opened.outvars)

    def _equation(self, equation: Equation, rows: list[Known]) -> tuple[Equation, list[Known]]:
        """Return an equation with marked contractions, and the rows of its outputs."""
        name = equation.primitive.name
        if name in ("sharding_constraint", "reshard"):
            return equation, [self._constrained(equation, rows[0])]
        if name == "shard_map":
            return self._map(equation, rows)
        if name in _CALLS:
            return self._call(equation, rows)
        if name == "scan":
            return self._scan(equation, rows)
        if name == "while":
            return self._while(equation, rows)
        if name == "cond":
            return self._cond(equation, rows)
        return self._plain(equation, rows)

    def _plain(self, equation: Equation, rows: list[Known]) -> tuple[Equation, list[Known]]:
        """Mark an equation that holds no program, if it contracts rows."""
        if _is_one_number(equation, rows):
            return equation, [Alike()] * len(equation.outvars)
        are_lost = [isinstance(each, Lost) for each in rows]
        dims = list(map(_dimensions, rows))
        choices = (contraction(equation, each) for each in _with_rows_alike(equation, rows))
        if (split := next((each for each in choices if each is not None), None)) is not None:
            why = None
            if not splits_evenly(equation, split, self._workers.count):
                why = f"its rows do not split evenly among {self._workers.count} workers"
            return self._sum(equation, None if why else split, why), [()]
        lost = next((each for each in rows if isinstance(each, Lost)), None)
        if lost and may_contract(equation, dims, are_lost):
            return self._sum(equation, None, lost.why), [()]
        if lost is None and any(dims) and not ends(equation):
            line = equations.place(equation) or "an unknown line"
            lost = Lost(
                f"its rows are not followed through {equation.primitive.name!r} of {line}: give "
                "the result jax.lax.with_sharding_constraint"
            )
        return equation, [each or lost or () for each in follow(equation, dims)]

    def _sum(self, equation: Equation, split: list[Row] | None, why: str | None) -> Equation:
        """Return a contraction as a sum.

        Args:
          equation: the contraction.
          split: dimensions of the operands along which each worker takes a part.
          why: reason to leave it to the compiler, without a split.
        """
        params = {
            "equation": equation,
            "split": split and tuple(split),
            "why_exact": why,
            "axes": (self._workers.axis,),
            "mesh": self._workers.mesh,
        }
        return equation.replace(primitive=sum_over_rows, params=params)

    def _constrained(self, equation: Equation, rows: Known) -> Known:
        """Rows lie where a sharding puts them."""
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return rows
        if equation.primitive.name == "reshard" and self._workers.axis in sharding.mesh.auto_axes:
            return rows  # into a part of the program where the compiler manages the axis
        spec = [*sharding.spec, *[None] * len(equations.shape_of(equation.outvars[0]))]
        moved = rows_of_spec(spec, self._workers.axis)
        kept = (dim for dim in _dimensions(rows) if spec[dim] is PartitionSpec.UNCONSTRAINED)
        return moved or tuple(kept)

    def _placed(self, shardings: Sequence[Any], rows: Sequence[Known]) -> list[Known]:
        """Return the rows of values with the shardings of a function, where these are given."""
        return [
            rows_of_spec(sharding.spec, self._workers.axis)
            if isinstance(sharding, NamedSharding)
            else each
            for sharding, each in zip(shardings, rows, strict=True)
        ]

    def _call(self, equation: Equation, rows: Sequence[Known]) -> tuple[Equation, list[Known]]:
        params = equation.params
        name = next(name for name, value in params.items() if equations.is_program(value))
        if "in_shardings" in params:
            rows = self._placed(params["in_shardings"], rows)
        program, after = self.program(params[name], rows)
        if "out_shardings" in params:
            after = self._placed(params["out_shardings"], after)
        return equation.replace(params={**params, name: program}), after

    def _map(self, equation: Equation, rows: Sequence[Known]) -> tuple[Equation, list[Known]]:
        params = equation.params
        if self._workers.axis in equations.mapped_axes(equation):
            return equation, [
                rows_of_spec(spec, self._workers.axis) for spec in params["out_specs"]
            ]
        program, after = self.program(params["jaxpr"], rows)
        return equation.replace(params={**params, "jaxpr": program}), after

    def _scan(self, equation: Equation, rows: Sequence[Known]) -> tuple[Equation, list[Known]]:
        first, carried = equations.scan_counts(equation)
        last = first + carried
        turns = [_shifted(each, -1) for each in rows[last:]]
        program, carry, after = self._loop(
            equation.params["jaxpr"], rows[:first], rows[first:last], turns
        )
        stacked = [_shifted(each, 1) for each in after[carried:]]
        return equation.replace(params={**equation.params, "jaxpr": program}), carry + stacked

    def _while(self, equation: Equation, rows: Sequence[Known]) -> tuple[Equation, list[Known]]:
        params = equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        program, carry, _ = self._loop(params["body_jaxpr"], rows[first:last], rows[last:], ())
        return equation.replace(params={**params, "body_jaxpr": program}), carry

    def _loop(
        self, body: Any, constants: Sequence[Known], carry: Sequence[Known], turns: Sequence[Known]
    ) -> tuple[Any, list[Known], list[Known]]:
        """Return the body of a loop, and the rows of all that it carries and of its outputs.

        Values that begin without rows, such as zeros, have those of the turn before.
        """
        carry = list(carry)
        for _ in range(_MOST_ROUNDS):
            program, after = self.program(body, [*constants, *carry, *turns])
            joined = [_dimensions(one) or two for one, two in zip(carry, after, strict=False)]
            if joined == carry:
                break
            carry = joined
        return program, carry, after

    def _cond(self, equation: Equation, rows: Sequence[Known]) -> tuple[Equation, list[Known]]:
        branches, of_each = zip(
            *(self.program(branch, rows[1:]) for branch in equation.params["branches"]),
            strict=True,
        )
        after = [
            next(filter(_dimensions, of_output), of_output[0])
            for of_output in zip(*of_each, strict=True)
        ]
        return equation.replace(params={**equation.params, "branches": branches}), after


def _is_one_number(equation: Equation, rows: Sequence[Known]) -> bool:
    """Return whether an equation makes one number in all places of its result, as a hint."""
    shapes = list(map(equations.shape_of, equation.invars))
    if equation.primitive.name == "broadcast_in_dim":
        return shapes[:1] == [()]
    alike = [s for s, each in zip(shapes, rows, strict=True) if isinstance(each, Alike)]
    are_others_numbers = shapes.count(()) + len(alike) == len(shapes)
    results = map(equations.shape_of, equation.outvars[:1])  # a callback may have none
    return are_others_numbers and any(shape in alike for shape in results)


def _with_rows_alike(equation: Equation, rows: Sequence[Known]) -> Iterator[list[Rows]]:
    """Yield the rows of operands, then those with each dimension of one whose rows are alike."""
    dims = list(map(_dimensions, rows))
    yield dims
    for i, each in enumerate(rows):
        if isinstance(each, Alike):
            rank = len(equations.shape_of(equation.invars[i]))
            yield from ([*dims[:i], (dim,), *dims[i + 1 :]] for dim in range(rank))


def _dimensions(rows: Known) -> Rows:
    """Return the dimensions that hold rows, as far as they are known."""
    return rows if isinstance(rows, tuple) else ()


def _shifted(rows: Known, by: int) -> Known:
    """Return rows behind other dimensions, or without the first dimension."""
    return tuple(d + by for d in rows if d + by >= 0) if isinstance(rows, tuple) else rows
