"""Leaves for which a backward pass returns their next state in place of a gradient.

FP8 layers keep histories of magnitudes so. The flow of data shows it, under any name: a gradient is
made from the cotangent of the loss, and from nothing else that is added to it.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dynamiq_jax._inputs import checks
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.equations import Equation


class _Origin(enum.IntEnum):
    """Origin of a value of a backward pass."""

    CONSTANT = 0
    FORWARD = 1  # arguments of the loss, and values of the forward pass
    COTANGENT = 2  # of the loss, and what is made from it
    PARTS = 3  # parts of the last two side by side, in one array


# Equations that put values side by side in one array, and those of their inputs.
_JOINS = {
    "concatenate": slice(None),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, 3, 2),
    "select_n": slice(1, None),
}
_OF_FORM = {"convert_element_type", "copy", "reshape", "squeeze", "broadcast_in_dim", "transpose"}
_RULE = "custom_vjp_call"


def check_gradients(
    loss_of: Callable[[list[Array]], Array],
    leaves: list[Array],
    names: Sequence[str],
    axes: Sequence[str],
) -> None:
    """Raise ValueError for a leaf whose gradient is the next state of the leaf.

    Only rules of a user can return such: a loss without any is traced once more, and not
    differentiated.

    Args:
      loss_of: function of leaves to the loss.
      leaves: leaves that are differentiated.
      names: their names, for the error.
      axes: axes of the workers, for the error.
    """

    def backward(leaves: list[Array], scale: Array) -> list[Array]:
        loss, pull = jax.vjp(loss_of, leaves)
        gradients: list[Array]
        (gradients,) = pull(compat.match_varying(scale.astype(loss.dtype), loss))
        return gradients

    if not _holds_rule(jax.make_jaxpr(loss_of)(leaves)):
        return
    program = jax.make_jaxpr(backward)(leaves, jnp.float32(1))
    found = _origins(program, [_Origin.FORWARD] * len(leaves) + [_Origin.COTANGENT])
    for name, origin in zip(names, found, strict=True):
        if origin in (_Origin.FORWARD, _Origin.PARTS):
            raise checks.not_a_gradient(name, axes)


def _holds_rule(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith(_RULE)
        or any(map(_holds_rule, equations.programs_in(equation)))
        for equation in equations.opened(program)[0].eqns
    )


def _origins(program: Any, inputs: Sequence[_Origin]) -> list[_Origin]:
    """Return the origins of the results of a program from those of its inputs."""
    inner, constants = equations.opened(program)
    known: dict[Any, _Origin] = dict(zip(inner.invars, inputs, strict=True))
    for variable, value in zip(inner.constvars, constants, strict=True):
        is_known = not isinstance(value, jax.core.Tracer)
        known[variable] = _Origin.CONSTANT if is_known else _Origin.FORWARD

    def origin(atom: Any) -> _Origin:
        return known[atom] if equations.is_variable(atom) else _Origin.CONSTANT

    for equation in inner.eqns:
        results = _of_results(equation, [origin(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [origin(atom) for atom in inner.outvars]


def _of_results(equation: Equation, inputs: list[_Origin]) -> list[_Origin]:
    name, count = equation.primitive.name, len(equation.outvars)
    programs = list(equations.programs_in(equation))
    if name == "cond":
        branches = [_origins(program, inputs[1:]) for program in programs]
        return list(map(max, zip(*branches, strict=True)))
    if name == "scan":
        constants, carried = equations.scan_counts(equation)
        while True:
            results = _origins(programs[0], inputs)
            next_inputs = [*inputs[:constants], *results[:carried], *inputs[constants + carried :]]
            joined = list(map(max, zip(inputs, next_inputs, strict=True)))
            if joined == inputs:
                return results
            inputs = joined
    if len(programs) == 1:
        inner, _ = equations.opened(programs[0])
        if (len(inner.invars), len(inner.outvars)) == (len(inputs), count):
            return _origins(programs[0], inputs)
    if name in _JOINS and {_Origin.FORWARD, _Origin.COTANGENT} <= {*inputs[_JOINS[name]]}:
        return [_Origin.PARTS] * count
    most = max(inputs, default=_Origin.CONSTANT)
    if most == _Origin.PARTS and name not in (*_OF_FORM, *_JOINS):
        most = _Origin.COTANGENT  # computed from such parts, as a scale is
    return [most] * count
