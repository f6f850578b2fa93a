"""Sums that the compiler places: contractions of rows, which it splits over workers.

In a step with shardings alone, no equation sums over workers. Where rows are split over an axis,
each equation that contracts them is such a sum. It becomes an equation of the primitive
`sum_over_rows`, which computes the same, and is a sum for whoever reads the program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._rewriting.rows import Rows, contraction, follow, rows_of_spec
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


@dataclasses.dataclass(frozen=True)
class Workers:
    """Workers among which the compiler splits rows: the devices along one axis of a mesh."""

    axis: str
    mesh: Mesh | AbstractMesh

    @property
    def count(self) -> int:
        """Number of workers."""
        size: int = self.mesh.shape[self.axis]
        return size


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

    def __init__(self, workers: Workers):
        self._workers = workers
        self._marked: dict[Any, tuple[Any, list[Rows]]] = {}

    def program(self, program: Any, rows: Sequence[Rows]) -> tuple[Any, list[Rows]]:
        """Return a program with marked contractions, and the rows of its outputs.

        Args:
          program: traced program.
          rows: rows of its inputs.
        """
        place = id(program), tuple(rows)
        if place not in self._marked:
            self._marked[place] = self._mark(program, rows)
        return self._marked[place]

    def _mark(self, program: Any, rows: Sequence[Rows]) -> tuple[Any, list[Rows]]:
        opened, constants = equations.opened(program)
        known: dict[Any, Rows] = dict(zip(opened.invars, rows, strict=True))

        def rows_of(atoms: Sequence[Any]) -> list[Rows]:
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

    def _equation(self, equation: Equation, rows: list[Rows]) -> tuple[Equation, list[Rows]]:
        """Return an equation with marked contractions, and the rows of its outputs."""
        name = equation.primitive.name
        if name in ("sharding_constraint", "reshard"):
            return equation, [self._constrained(equation, rows[0])]
        if name == "shard_map":
            return self._map(equation, rows)
        if not any(rows):
            return equation, [()] * len(equation.outvars)
        if name in _CALLS:
            return self._call(equation, rows)
        if name == "scan":
            return self._scan(equation, rows)
        if name == "while":
            return self._while(equation, rows)
        if name == "cond":
            return self._cond(equation, rows)
        split = contraction(equation, rows, self._workers.count)
        if split is not None:
            params = {
                "equation": equation,
                "split": tuple(split),
                "axes": (self._workers.axis,),
                "mesh": self._workers.mesh,
            }
            return equation.replace(primitive=sum_over_rows, params=params), [()]
        return equation, follow(equation, rows)

    def _constrained(self, equation: Equation, rows: Rows) -> Rows:
        """Rows lie where a sharding puts them."""
        sharding = equation.params.get("sharding", equation.params.get("dst_sharding"))
        if not isinstance(sharding, NamedSharding):
            return rows
        if equation.primitive.name == "reshard" and self._workers.axis in sharding.mesh.auto_axes:
            return rows  # into a part of the program where the compiler manages the axis
        spec = [*sharding.spec, *[None] * len(equations.shape_of(equation.outvars[0]))]
        moved = rows_of_spec(spec, self._workers.axis)
        return moved or tuple(dim for dim in rows if spec[dim] is PartitionSpec.UNCONSTRAINED)

    def _placed(self, shardings: Sequence[Any], rows: Sequence[Rows]) -> list[Rows]:
        """Return the rows of values with the shardings of a function, where these are given."""
        return [
            rows_of_spec(sharding.spec, self._workers.axis)
            if isinstance(sharding, NamedSharding)
            else each
            for sharding, each in zip(shardings, rows, strict=True)
        ]

    def _call(self, equation: Equation, rows: Sequence[Rows]) -> tuple[Equation, list[Rows]]:
        params = equation.params
        name = next(name for name, value in params.items() if equations.is_program(value))
        if "in_shardings" in params:
            rows = self._placed(params["in_shardings"], rows)
        program, after = self.program(params[name], rows)
        if "out_shardings" in params:
            after = self._placed(params["out_shardings"], after)
        return equation.replace(params={**params, name: program}), after

    def _map(self, equation: Equation, rows: Sequence[Rows]) -> tuple[Equation, list[Rows]]:
        params = equation.params
        if self._workers.axis in equations.mapped_axes(equation):
            return equation, [
                rows_of_spec(spec, self._workers.axis) for spec in params["out_specs"]
            ]
        program, after = self.program(params["jaxpr"], rows)
        return equation.replace(params={**params, "jaxpr": program}), after

    def _scan(self, equation: Equation, rows: Sequence[Rows]) -> tuple[Equation, list[Rows]]:
        first, carried = equations.scan_counts(equation)
        last = first + carried
        turns = [tuple(dim - 1 for dim in each if dim) for each in rows[last:]]
        program, carry, after = self._loop(
            equation.params["jaxpr"], rows[:first], rows[first:last], turns
        )
        stacked = [tuple(dim + 1 for dim in each) for each in after[carried:]]
        return equation.replace(params={**equation.params, "jaxpr": program}), carry + stacked

    def _while(self, equation: Equation, rows: Sequence[Rows]) -> tuple[Equation, list[Rows]]:
        params = equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        program, carry, _ = self._loop(params["body_jaxpr"], rows[first:last], rows[last:], ())
        return equation.replace(params={**params, "body_jaxpr": program}), carry

    def _loop(
        self, body: Any, constants: Sequence[Rows], carry: Sequence[Rows], turns: Sequence[Rows]
    ) -> tuple[Any, list[Rows], list[Rows]]:
        """Return the body of a loop, and the rows of all that it carries and of its outputs.

        Values that begin without rows, such as zeros, have those of the turn before.
        """
        carry = list(carry)
        for _ in range(_MOST_ROUNDS):
            program, after = self.program(body, [*constants, *carry, *turns])
            joined = [before or now for before, now in zip(carry, after, strict=False)]
            if joined == carry:
                break
            carry = joined
        return program, carry, after

    def _cond(self, equation: Equation, rows: Sequence[Rows]) -> tuple[Equation, list[Rows]]:
        branches, of_each = zip(
            *(self.program(branch, rows[1:]) for branch in equation.params["branches"]),
            strict=True,
        )
        after = [next(filter(None, of_output), ()) for of_output in zip(*of_each, strict=True)]
        return equation.replace(params={**equation.params, "branches": branches}), after
