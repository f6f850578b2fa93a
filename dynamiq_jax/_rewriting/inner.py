"""Equations that hold programs: which programs, and how the equation is made anew around others.

Each kind of equation is made again by the function of JAX that a user calls for it. A kind that is
not here is an error, as soon as it holds a sum to compress.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from dynamiq_jax._rewriting.rows import WorkerAxis
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

# A program that has a schedule, as a function of the key and its inputs.
Body = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class InnerProgram:
    """Program of an equation, as it runs there. The outermost one is that of a step."""

    program: Any
    times: int | None = 1  # that it runs in one call of the equation; None if that is not known
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of axes made manual
    mesh: Any = None  # in which they are
    # Numbers of the inputs of the equation that are its inputs; None if they are not known, as are
    # its outputs then.
    inputs: Sequence[int] | None = None
    has_outputs: bool = True  # whether its outputs are those of the equation
    # Specs that the equation fixes, by the numbers of inputs and outputs.
    input_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    output_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    # Specs of outputs for sums of the compiler of which nothing is known, by numbers.
    likely_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    # Outputs that the next turn of a loop takes as inputs, by the number of the output.
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)
    leaving: Collection[int] = ()  # outputs that may be sums, which are done behind the equation
    totals: Collection[int] = ()  # carried outputs that may be sums, too, if they begin at zero
    # First input of which each turn of a loop takes a part. Outputs that are not carried are those
    # of all turns, then.
    first_of_turn: int | None = None
    shapes: Sequence[tuple[int, ...]] = ()  # of the outputs of the equation, if sums may leave it

    def within(self, outer: "InnerProgram", **changes: Any) -> "InnerProgram":
        """Return this program as it runs inside of another one.

        Args:
          outer: the other program.
          **changes: fields of which more is known there.
        """
        times = None
        if self.times is not None and outer.times is not None:
            times = self.times * outer.times
        return dataclasses.replace(
            self,
            times=times,
            sizes={**outer.sizes, **self.sizes},
            mesh=self.mesh or outer.mesh,
            **changes,
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


# Calls whose program can stand in place of the call. Rules of differentiation are lost with it:
# compressed sums have none.
_CALLS = {
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "eval_jaxpr",
}


def is_call(equation: Equation, is_mapped: bool) -> bool:
    """Return whether the program of an equation can stand in its place.

    Args:
      equation: equation with one program.
      is_mapped: whether it is inside of a map over devices.
    """
    if equation.primitive.name in ("jit", "pjit"):
        params = equation.params
        shardings = (*params["in_shardings"], *params["out_shardings"])
        is_placed = any(isinstance(each, Sharding) for each in shardings)
        return is_mapped or not (is_placed or params["compiler_options_kvs"])
    return equation.primitive.name in _CALLS


def called(equation: Equation) -> Any:
    """Return the program of a call."""
    return next(equations.programs_in(equation))


def specs_of_shardings(shardings: Sequence[Any]) -> dict[int, PartitionSpec]:
    """Return the specs of shardings, by their numbers, of those that fix all dimensions."""
    return {
        i: each.spec
        for i, each in enumerate(shardings)
        if isinstance(each, NamedSharding) and PartitionSpec.UNCONSTRAINED not in each.spec
    }


def layout(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the parameters of a sum that say where its terms and its parts lie."""
    names = ("scatter_dimension", "all_gather_dimension", "tiled")
    is_unreduced = ("is_unreduced", "dst_sharding" in params)
    return (is_unreduced, *((name, params[name]) for name in names if name in params))


def parts_of(equation: Equation) -> list[InnerProgram]:
    """Return the programs of an equation.

    Raises:
      ValueError: equations of this kind cannot be made anew.
    """
    _check_known(equation)
    return _PARTS[equation.primitive.name](equation)


def programs_of(equation: Equation) -> list[InnerProgram]:
    """Return the programs of an equation, of any kind."""
    if parts := _PARTS.get(equation.primitive.name):
        return parts(equation)
    if equation.primitive.name in _CALLS:
        return [InnerProgram(called(equation), inputs=_all_inputs(equation))]
    programs = equations.programs_in(equation)
    return [InnerProgram(program, times=None, has_outputs=False) for program in programs]


def _all_inputs(equation: Equation) -> Sequence[int]:
    return range(len(equation.invars))


def make_anew(
    equation: Equation,
    scopes: str,
    bodies: Sequence[Body],
    key: Array | None,
    values: Sequence[Any],
) -> Sequence[Any]:
    """Evaluate an equation with other programs in place of its own.

    Args:
      equation: the equation.
      scopes: names of the scopes around it, its own ones included.
      bodies: the programs, in the order of `parts_of`.
      key: PRNG key for all sums, if the user has given one.
      values: inputs.
    """
    make = _FUNCTIONS[equation.primitive.name]
    with jax.named_scope(scopes) if scopes else jax.named_scope("compress"):
        return make(equation, bodies, key, values)


def _map_parts(equation: Equation) -> list[InnerProgram]:
    params = equation.params
    sizes = {name: params["mesh"].shape[name] for name in equations.mapped_axes(equation)}
    inputs = _all_inputs(equation)
    return [InnerProgram(params["jaxpr"], inputs=inputs, sizes=sizes, mesh=params["mesh"])]


def _make_map(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    params = equation.params
    return jax.shard_map(
        lambda key, *values: tuple(bodies[0](key, *values)),
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(equations.mapped_axes(equation)),
    )(key, *values)


def _scan_parts(equation: Equation) -> list[InnerProgram]:
    params = equation.params
    constants, carried = equations.scan_counts(equation)
    return [
        InnerProgram(
            params["jaxpr"],
            times=params["length"],
            inputs=_all_inputs(equation),
            carried={i: constants + i for i in range(carried)},
            leaving=range(carried, len(equation.outvars)),
            totals=range(carried),
            first_of_turn=constants + carried,
            shapes=list(map(equations.shape_of, equation.outvars)),
        )
    ]


def _make_scan(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    params = equation.params
    first, carried = equations.scan_counts(equation)
    last = first + carried
    constants, carry, rows = values[:first], values[first:last], values[last:]

    def body(carry: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = bodies[0](key, *constants, *carry, *row)
        return outputs[: len(carry)], outputs[len(carry) :]

    carry, rows = lax.scan(
        body,
        list(carry),
        list(rows),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *rows]


def _while_parts(equation: Equation) -> list[InnerProgram]:
    params = equation.params
    first, constants = params["cond_nconsts"], params["body_nconsts"]
    carry = range(first + constants, len(equation.invars))
    return [
        InnerProgram(
            params["cond_jaxpr"], times=None, inputs=(*range(first), *carry), has_outputs=False
        ),
        InnerProgram(
            params["body_jaxpr"],
            times=None,
            inputs=range(first, len(equation.invars)),
            carried={i: constants + i for i in range(len(carry))},
        ),
    ]


def _make_while(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    first = equation.params["cond_nconsts"]
    last = first + equation.params["body_nconsts"]
    condition, body = bodies
    return lax.while_loop(
        lambda carry: condition(key, *values[:first], *carry)[0],
        lambda carry: body(key, *values[first:last], *carry),
        list(values[last:]),
    )


def _cond_parts(equation: Equation) -> list[InnerProgram]:
    inputs = range(1, len(equation.invars))
    return [InnerProgram(branch, inputs=inputs) for branch in equation.params["branches"]]


def _make_cond(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    index, *operands = values
    branches = [lambda *operands, body=body: body(key, *operands) for body in bodies]
    platforms = equation.params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    # Of `lax.platform_dependent`, where JAX lowers the branch of one platform alone.
    by_platform = {
        name: branch
        for names, branch in zip(platforms, branches, strict=True)
        for name in names or ("default",)
    }
    return lax.platform_dependent(*operands, **by_platform)


def _remat_parts(equation: Equation) -> list[InnerProgram]:
    return [
        InnerProgram(
            equation.params["jaxpr"],
            inputs=_all_inputs(equation),
            leaving=range(len(equation.outvars)),
            shapes=list(map(equations.shape_of, equation.outvars)),
        )
    ]


def _make_remat(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    # jax.checkpoint would mark it as not differentiated: XLA would share what it computes again.
    traced = jax.make_jaxpr(lambda *values: bodies[0](key, *values))(*values)
    program, constants = equations.with_leading_constants(traced)
    params = {**equation.params, "jaxpr": program}
    return equation.primitive.bind(*constants, *values, **params)


def _jit_parts(equation: Equation) -> list[InnerProgram]:
    params = equation.params
    return [
        InnerProgram(
            params["jaxpr"],
            inputs=_all_inputs(equation),
            input_specs=specs_of_shardings(params["in_shardings"]),
            output_specs=specs_of_shardings(params["out_shardings"]),
        )
    ]


def _make_jit(
    equation: Equation, bodies: Sequence[Body], key: Array | None, values: Sequence[Any]
) -> Sequence[Any]:
    params = equation.params

    def placed(part: str) -> tuple[Sharding | None, ...]:
        return tuple(
            each if isinstance(each, Sharding) else None for each in params[f"{part}_shardings"]
        )

    def function(*values: Any) -> tuple[Any, ...]:
        return tuple(bodies[0](key, *values))

    function.__name__ = params["name"]
    return jax.jit(
        function,
        in_shardings=placed("in"),
        out_shardings=placed("out"),
        compiler_options=dict(params["compiler_options_kvs"]) or None,
    )(*values)


_PARTS: dict[str, Callable[[Equation], list[InnerProgram]]] = {
    "shard_map": _map_parts,
    "scan": _scan_parts,
    "while": _while_parts,
    "cond": _cond_parts,
    "remat2": _remat_parts,
    "checkpoint": _remat_parts,
    "jit": _jit_parts,
    "pjit": _jit_parts,
}
_FUNCTIONS: dict[
    str, Callable[[Equation, Sequence[Body], Array | None, Sequence[Any]], Sequence[Any]]
] = {
    "shard_map": _make_map,
    "scan": _make_scan,
    "while": _make_while,
    "cond": _make_cond,
    "remat2": _make_remat,
    "checkpoint": _make_remat,
    "jit": _make_jit,
    "pjit": _make_jit,
}


def _check_known(equation: Equation) -> None:
    name = equation.primitive.name
    if name not in _PARTS:
        raise ValueError(
            f"The step has a sum to compress inside of {name!r}, from {equations.place(equation)}. "
            "dq.compress cannot replace it there. Leave it exact with only=, or write the sum with "
            "dq.pmean yourself."
        )
