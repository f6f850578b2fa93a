"""Equations of traced programs: what differs between versions of JAX."""

import collections
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding

from pallas_kernels._jax import compat

# An equation of a traced program, the program, and a value or constant in it. JAX 0.12 has one
# class for programs with and without constants.
Equation = core.JaxprEqn
Program = core.Jaxpr
Atom = core.Var | core.Literal
_PROGRAMS = (core.Jaxpr, core.ClosedJaxpr)


def opened(program: Any) -> tuple[Program, Sequence[Any]]:
    """Split a traced program into the program without constants and its constants."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def is_program(value: Any) -> bool:
    """Return whether a parameter of an equation is a traced program."""
    return isinstance(value, _PROGRAMS)


def programs_in(equation: Equation) -> Iterator[Any]:
    """Yield the traced programs among the parameters of an equation."""
    for value in equation.params.values():
        if isinstance(value, _PROGRAMS):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from filter(is_program, value)


def with_programs(equation: Equation, programs: Mapping[int, Any]) -> Equation:
    """Replace programs of an equation, by their ids."""

    def replaced(value: Any) -> Any:
        if isinstance(value, tuple) and any(map(is_program, value)):
            return tuple(map(replaced, value))
        return programs.get(id(value), value) if is_program(value) else value

    params = {name: replaced(value) for name, value in equation.params.items()}
    return equation.replace(params=params)


def has_effects(equation: Equation) -> bool:
    """Return whether an equation has to keep its place among others: prints, callbacks, references.

    JAX calls the use of an axis an effect, too. Such equations may change places.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


# Equations with the name of an axis that send no message.
_SILENT = {
    *("axis_index", "pcast", "pvary", "preduced", "reduced_vary_cast", "vary_unreduced_cast"),
    *("vary_unreduced_cast_p", "pbroadcast", "same_over"),
}
_JITTED = type(jax.jit(lambda: None))


def collective_axes(equation: Equation) -> frozenset[str]:
    """Return the axes of the surroundings over which an equation sends messages."""
    params = equation.params
    axes: set[str] = set()
    if equation.primitive.name not in _SILENT:
        for name in ("axes", "axis_name"):
            if given := params.get(name):
                given = given if isinstance(given, (tuple, list)) else (given,)
                axes.update(axis for axis in given if isinstance(axis, str))
    for program in programs_in(equation):
        for each in opened(program)[0].eqns:
            axes |= collective_axes(each)
    if equation.primitive.name == "shard_map":
        axes -= mapped_axes(equation)
    return frozenset(axes)


def bound_axes(program: Any) -> frozenset[str]:
    """Return the axes that exist somewhere in a traced program: of its maps, or of types."""
    axes: set[str] = set()
    for equation in opened(program)[0].eqns:
        if equation.primitive.name == "shard_map":
            axes |= mapped_axes(equation)
        if sums_of_reshard(equation):
            axes |= explicit_sizes(equation).keys()
        for inner in programs_in(equation):
            axes |= bound_axes(inner)
    return frozenset(axes)


def is_loop(equation: Equation) -> bool:
    """Return whether an equation is one loop in the compiled program, with all of its turns.

    Not so a `scan` of one turn, or one that is unrolled, be it in part: its last turns may come
    behind the loop.
    """
    is_rolled = equation.params.get("unroll") == 1 and equation.params.get("length") != 1
    return equation.primitive.name == "while" or (equation.primitive.name == "scan" and is_rolled)


def without_unused(program: Any) -> Any:
    """Return a traced program without equations whose results are not used and have no effect."""
    inner, constants = opened(program)
    everything = [True] * len(inner.outvars)
    used, _ = partial_eval.dce_jaxpr(inner, everything, instantiate=True)
    return core.ClosedJaxpr(used, constants)


def evaluate(equation: Equation, *values: Any) -> Sequence[Any]:
    """Evaluate an equation as JAX does, with its scopes and source lines.

    It takes the inputs that are variables, and returns the outputs that are used.
    """
    info = equation.source_info
    scopes = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=scopes), equation.ctx.manager:
        results = bound(equation, with_literals(equation, values))
    return [each for each, out in zip(results, equation.outvars, strict=True) if is_used(out)]


def bound(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Apply the primitive of an equation to other values, and return its results."""
    given = equation.primitive.get_bind_params(equation.params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def in_context(equation: Equation, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called with the mesh that is set around an equation."""

    def called(*values: Any) -> Any:
        with equation.ctx.manager:
            return function(*values)

    return called


def without_shardings(equation: Equation) -> Equation:
    """Remove the shardings of an equation, so that the compiler places its result."""
    params = {
        name: None if isinstance(value, NamedSharding) else value
        for name, value in equation.params.items()
    }
    return equation.replace(params=params)


def with_literals(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Return all inputs of an equation: literals, and the values given for its variables."""
    given = iter(values)
    return [next(given) if is_variable(atom) else atom.val for atom in equation.invars]  # type: ignore[union-attr]


def is_variable(atom: Any) -> bool:
    """Return whether an input of an equation is a variable; others are literals."""
    return not isinstance(atom, core.Literal)


def is_used(out: Any) -> bool:
    """Return whether an output of an equation is used."""
    return not isinstance(out, core.DropVar)


def with_leading_constants(program: Any) -> tuple[Program, list[Any]]:
    """Make the constants of a program its first inputs, and return the program and them."""
    inner, constants = opened(program)
    inputs, outputs = [*inner.constvars, *inner.invars], list(inner.outvars)
    names = tuple(f"input_{number}" for number in range(len(inputs)))
    results = tuple(f"output_{number}" for number in range(len(outputs)))
    described = core.DebugInfo("compress", "dynamiq_jax.compress", names, results)
    program = core.Jaxpr((), inputs, outputs, inner.eqns, inner.effects, described)
    return program, list(constants)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of an input or output of an equation."""
    return tuple(atom.aval.shape)


def dtype_of(atom: Any) -> np.dtype[Any]:
    """Return the dtype of an input or output of an equation."""
    dtype: np.dtype[Any] = atom.aval.dtype
    return dtype


def zeros_like(atom: Any) -> Any:
    """Return zeros of the type of a value of a program, the axes over which it varies included."""
    return compat.match_varying(jnp.zeros(atom.aval.shape, atom.aval.dtype), atom.aval)


def sums_of_reshard(equation: Equation) -> tuple[str, ...]:
    """Return the explicit axes over which an equation sums an unreduced array: since JAX 0.11."""
    if equation.primitive.name != "reshard":
        return ()
    before, after = (
        set(getattr(_spec(atom), "unreduced", ()))
        for atom in (equation.invars[0], equation.outvars[0])
    )
    return tuple(sorted(before - after))


def _spec(atom: Any) -> Any:
    return getattr(getattr(atom.aval, "sharding", None), "spec", None)


def typed_spec(atom: Any) -> jax.sharding.PartitionSpec:
    """Return the spec that is a part of the type of an input or output of an equation.

    Dimensions at its end that are not split are left out, and so is all but the dimensions.
    """
    return trimmed(compat.partitions(_spec(atom) or jax.sharding.PartitionSpec()))


def trimmed(dimensions: Iterable[Any]) -> jax.sharding.PartitionSpec:
    """Return the spec of dimensions without those at its end that are not split."""
    parts = list(dimensions)
    while parts and parts[-1] is None:
        parts.pop()
    return jax.sharding.PartitionSpec(*parts)


def explicit_sizes(equation: Equation) -> dict[str, int]:
    """Return the sizes of the axes of the mesh of an equation's first input, by name."""
    sharding = getattr(equation.invars[0].aval, "sharding", None)
    return dict(sharding.mesh.shape) if sharding is not None else {}


def shardings_of(program: Any, side: Literal["in", "out"]) -> list[Any]:
    """Return the shardings that jitted functions in a program give to its inputs, or its results.

    They are None where there is none.
    """
    inner, _ = opened(program)
    given = {}
    for equation in inner.eqns:
        shardings = equation.params.get(f"{side}_shardings", ())
        for variable, sharding in zip(getattr(equation, f"{side}vars"), shardings, strict=False):
            if isinstance(sharding, NamedSharding):
                given[id(variable)] = sharding
    return [given.get(id(atom)) for atom in getattr(inner, f"{side}vars")]


def donated_inputs(program: Any) -> Iterator[int]:
    """Yield the numbers of the inputs of a program that a jitted function in it may overwrite."""
    inner, _ = opened(program)
    uses = collections.Counter(
        id(atom) for atoms in (*(e.invars for e in inner.eqns), inner.outvars) for atom in atoms
    )
    inputs = {id(variable): number for number, variable in enumerate(inner.invars)}
    for equation in inner.eqns:
        donated = equation.params.get("donated_invars", ())
        for variable, is_donated in zip(equation.invars, donated, strict=False):
            if is_donated and id(variable) in inputs and uses[id(variable)] == 1:
                yield inputs[id(variable)]


def scan_counts(equation: Equation) -> tuple[int, int]:
    """Return how many inputs of a `scan` are constants, and how many are carried."""
    if "ft_in" not in equation.params:
        return equation.params["num_consts"], equation.params["num_carry"]
    constants, carried, _ = equation.params["ft_in"].unpack()  # since JAX 0.12
    return len(list(constants)), len(list(carried))


def mapped_axes(equation: Equation) -> frozenset[str]:
    """Return the axes that a `shard_map` maps over, which JAX 0.10.0 calls another name."""
    params = equation.params
    return params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]


def place(equation: Equation) -> str:
    """Return the line of the user's source that an equation is from; "" if it is not known."""
    try:
        info = importlib.import_module("jax._src.source_info_util")
        return str(info.summarize(equation.source_info))
    except (ImportError, AttributeError):
        return ""


def is_jitted(function: Any) -> bool:
    """Return whether a function is the result of `jax.jit`."""
    return isinstance(function, _JITTED) and hasattr(function, "_jit_info")


def unjitted(jitted: Any) -> Any:
    """Return the function that `jax.jit` was given."""
    return jitted.__wrapped__


def jit_like(function: Any, jitted: Any) -> Any:
    """Apply `jax.jit` to a function, with all settings of another one that was jitted.

    JAX has no public name for these settings.
    """
    given = jitted._jit_info

    def placed(sharding: Any, layout: Any) -> Any:
        if isinstance(layout, Layout):
            return Format(layout, sharding)
        is_given = isinstance(sharding, jax.sharding.Sharding | jax.sharding.PartitionSpec)
        return sharding if is_given else None

    def tree(part: str) -> Any:
        structure = getattr(given, f"{part}_shardings_treedef")
        leaves = (getattr(given, f"{part}_{what}_leaves") for what in ("shardings", "layouts"))
        return jax.tree.unflatten(structure, map(placed, *leaves))

    names = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
    settings: dict[str, Any] = {name: getattr(given, name) for name in (*names, "keep_unused")}
    for part in ("in", "out"):
        if any(leaf is not None for leaf in jax.tree.leaves(tree(part))):
            settings[f"{part}_shardings"] = tree(part)
    if given.compiler_options_kvs:
        settings["compiler_options"] = dict(given.compiler_options_kvs)
    return jax.jit(function, **settings)
