"""Equations that hold programs: which programs, and how the equation is made anew around others.

Each kind of equation is made again by the function of JAX that a user calls for it. A kind that is
not here is an error, as soon as it holds a sum to compress.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dynamiq_jax._rewriting.nodes import StepProgram
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

# Programs that have a schedule, as functions of the key and their inputs.
Bodies = Sequence[Callable[..., list[Any]]]
Key = Array | None  # for all sums, if the user has given one
Values = Sequence[Any]


# Calls whose program can stand in place of the call. Rules of differentiation are lost with it:
# compressed sums have none.
_CALLS = {
    *("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    "eval_jaxpr",
}


def is_call(equation: Equation, is_mapped: bool) -> bool:
    """Return whether the program of an equation, in a map over devices or not, can stand in its
    place.
    """
    if equation.primitive.name in ("jit", "pjit"):
        params = equation.params
        shardings = (*params["in_shardings"], *params["out_shardings"])
        is_placed = any(isinstance(each, Sharding) for each in shardings)
        return is_mapped or not (is_placed or params["compiler_options_kvs"])
    return equation.primitive.name in _CALLS


def specs_of_shardings(shardings: Sequence[Any]) -> dict[int, PartitionSpec]:
    """Map the number of each sharding that fixes all dimensions to its spec."""
    return {
        i: each.spec
        for i, each in enumerate(shardings)
        if isinstance(each, NamedSharding) and PartitionSpec.UNCONSTRAINED not in each.spec
    }


def programs_of(equation: Equation) -> list[StepProgram]:
    """Return the programs of an equation, of any kind."""
    if equation.primitive.name in _KINDS:
        parts, _ = _KINDS[equation.primitive.name]
        return parts(equation)
    programs = equations.programs_in(equation)
    if equation.primitive.name in _CALLS:
        return [StepProgram(next(programs), inputs=_all_inputs(equation))]
    return [StepProgram(program, times=None, has_outputs=False) for program in programs]


def _all_inputs(equation: Equation) -> Sequence[int]:
    return range(len(equation.invars))


def make_anew(equation: Equation, scopes: str, bodies: Bodies, key: Key, *values: Any) -> Values:
    """Evaluate an equation with other programs in place of its own, in the scopes around it."""
    _, make = _KINDS[equation.primitive.name]
    with jax.named_scope(scopes) if scopes else jax.named_scope("compress"):
        return make(equation, bodies, key, values)


def _map_parts(equation: Equation) -> list[StepProgram]:
    params = equation.params
    sizes = {name: params["mesh"].shape[name] for name in equations.mapped_axes(equation)}
    inputs = _all_inputs(equation)
    return [StepProgram(params["jaxpr"], inputs=inputs, sizes=sizes, mesh=params["mesh"])]


def _make_map(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
    params = equation.params
    return jax.shard_map(
        lambda key, *values: tuple(bodies[0](key, *values)),
        mesh=params["mesh"],
        in_specs=(PartitionSpec(), *params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(equations.mapped_axes(equation)),
    )(key, *values)


def _scan_parts(equation: Equation) -> list[StepProgram]:
    params = equation.params
    constants, carried = equations.scan_counts(equation)
    return [
        StepProgram(
            params["jaxpr"],
            times=params["length"],
            inputs=_all_inputs(equation),
            carried={i: constants + i for i in range(carried)},
            leaving=range(carried, len(equation.outvars)),
            totals=range(carried),
            first_of_turn=constants + carried,
        )
    ]


def _make_scan(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
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


def _while_parts(equation: Equation) -> list[StepProgram]:
    params = equation.params
    first, constants = params["cond_nconsts"], params["body_nconsts"]
    carry = range(first + constants, len(equation.invars))
    return [
        StepProgram(
            params["cond_jaxpr"], times=None, inputs=(*range(first), *carry), has_outputs=False
        ),
        StepProgram(
            params["body_jaxpr"],
            times=None,
            inputs=range(first, len(equation.invars)),
            carried={i: constants + i for i in range(len(carry))},
        ),
    ]


def _make_while(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
    first = equation.params["cond_nconsts"]
    last = first + equation.params["body_nconsts"]
    condition, body = bodies
    return lax.while_loop(
        lambda carry: condition(key, *values[:first], *carry)[0],
        lambda carry: body(key, *values[first:last], *carry),
        list(values[last:]),
    )


def _cond_parts(equation: Equation) -> list[StepProgram]:
    inputs = range(1, len(equation.invars))
    return [StepProgram(branch, inputs=inputs) for branch in equation.params["branches"]]


def _make_cond(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
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


def _remat_parts(equation: Equation) -> list[StepProgram]:
    return [
        StepProgram(
            equation.params["jaxpr"],
            inputs=_all_inputs(equation),
            leaving=range(len(equation.outvars)),
        )
    ]


def _make_remat(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
    # jax.checkpoint would mark it as not differentiated: XLA would share what it computes again.
    traced = jax.make_jaxpr(lambda *values: bodies[0](key, *values))(*values)
    program, constants = equations.with_leading_constants(traced)
    params = {**equation.params, "jaxpr": program}
    return equation.primitive.bind(*constants, *values, **params)


def _jit_parts(equation: Equation) -> list[StepProgram]:
    params = equation.params
    return [
        StepProgram(
            params["jaxpr"],
            inputs=_all_inputs(equation),
            input_specs=specs_of_shardings(params["in_shardings"]),
            output_specs=specs_of_shardings(params["out_shardings"]),
        )
    ]


def _make_jit(equation: Equation, bodies: Bodies, key: Key, values: Values) -> Values:
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


_KINDS: dict[
    str,
    tuple[
        Callable[[Equation], list[StepProgram]], Callable[[Equation, Bodies, Key, Values], Values]
    ],
] = {
    "shard_map": (_map_parts, _make_map),
    "scan": (_scan_parts, _make_scan),
    "while": (_while_parts, _make_while),
    "cond": (_cond_parts, _make_cond),
    **dict.fromkeys(("remat2", "checkpoint"), (_remat_parts, _make_remat)),
    **dict.fromkeys(("jit", "pjit"), (_jit_parts, _make_jit)),
}


def is_known(equation: Equation) -> bool:
    """Return whether an equation is of a kind that can be made anew, or replaced."""
    return equation.primitive.name in _KINDS or equation.primitive.name in _CALLS


def check_known(equation: Equation) -> None:
    """Raise ValueError for an equation of a kind that cannot be made anew."""
    name = equation.primitive.name
    if name not in _KINDS:
        raise ValueError(
            f"The step has a sum to compress inside of {name!r}, from {equations.place(equation)}. "
            "dq.compress cannot replace it there. Leave it exact with only=, or write the sum with "
            "dq.pmean yourself."
        )
