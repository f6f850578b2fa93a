"""Sums of a program that are to be compressed, and its equations as a flat list, in which calls are
replaced by what they call.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.kinds import Kind, Origin, SumResult
from dynamiq_jax._rewriting.nodes import Constant, Node, StepProgram, Value, Variable
from dynamiq_jax._rewriting.sums import (
    MIXED,
    NO_GRADIENT,
    NOT_CHOSEN,
    SMALL,
    ZEROS,
    Selection,
    Sum,
    SumOrigin,
    differentiation_of,
    is_over_rows,
    over_axes,
)
from pallas_kernels._jax import equations

# Reasons of sums that need not be sent, if their terms are zeros.
_OF_ANYTHING = (None, SMALL, NOT_CHOSEN, NO_GRADIENT["other"])


def chosen(
    program: StepProgram,
    continued: frozenset[SumResult],
    selection: Selection,
    why_inside: str | None = None,
) -> StepProgram:
    """Return a program with the sums of its equations, and why each one stays exact.

    A rule of a user is called once for each sum. A backward pass goes on with the sums that are
    `continued`. Where `why_inside` is given, all of them stay.
    """
    nodes = []
    for node in program.nodes:
        if node.programs:
            why = why_inside
            if selection.only is None and not inner.is_known(node.equation):
                why = f"inside of {node.equation.primitive.name!r}, which cannot be made anew"
            programs = tuple(chosen(each, continued, selection, why) for each in node.programs)
            inside = itertools.chain.from_iterable(each.nodes for each in programs)
            holds = any(each.holds_target or each.is_target or each.is_zeros for each in inside)
            node = dataclasses.replace(node, programs=programs, holds_target=holds)
        node = _chosen(node, continued, selection)
        if why_inside and (node.is_target or node.is_zeros):
            node = dataclasses.replace(node, why_exact=why_inside)
        nodes.append(node)
    return dataclasses.replace(program, nodes=tuple(nodes))


def _chosen(node: Node, continued: frozenset[SumResult], selection: Selection) -> Node:
    """Return an equation with the sum that it is, if it is one, and why that stays exact."""
    if (summed := over_axes(node.equation)) is None:
        return node
    params, (result,) = node.equation.params, node.results
    described, terms = node.equation.invars[0], node.operands[0]
    if is_over_rows(node.equation):  # the operands are those of a contraction
        described, terms = node.equation.outvars[0], result
    each = Sum(
        *summed,
        equations.shape_of(described),
        equations.dtype_of(described),
        equations.place(node.equation),
        node.scopes,
        differentiation_of(node.scopes),
        _origin(node, terms, is_continued=not continued.isdisjoint(result.sums)),
    )
    why = selection.why_exact(each, params)
    is_placed = node.equation.primitive.name == "reshard"  # zeros would lie elsewhere
    if terms.number == 0 and why in _OF_ANYTHING and not is_placed:
        why = ZEROS
    elif terms.kind == Kind.MIXED and why == NO_GRADIENT["other"]:
        why = MIXED
    # Contractions that stay with the compiler are none of its sums, but for gradients.
    if params.get("why_exact") not in (None, why):
        return node
    return dataclasses.replace(node, sum=each, why_exact=why)


def _origin(node: Node, terms: Origin, *, is_continued: bool) -> SumOrigin:
    """Return the origin of the terms of a sum, as users read it."""
    if differentiation_of(node.scopes) == "forward":
        return "forward"
    if is_continued:
        return "backward"
    kinds: dict[Kind, SumOrigin] = {Kind.GRADIENT: "gradient", Kind.FORWARD: "forward"}
    return kinds.get(terms.kind, "other")


def flat(
    program: StepProgram,
    call: int,
    names: dict[Variable, Value],
    calls: Iterator[int],
    *,
    is_mapped: bool,
    opens_all: bool = False,
) -> Iterator[Node]:
    """Yield the equations of a program, and in place of calls that hold sums, those inside.

    Args:
      program: the program.
      call: number of this call of it.
      names: values of inputs and outputs of the calls; filled here.
      calls: numbers of further calls.
      is_mapped: whether it is inside of a map over devices.
      opens_all: whether calls are opened whose settings count, since the caller takes them over.
    """
    for node in program.nodes:
        equation = node.equation
        inputs = tuple(value_of(each, call, names) for each in equation.invars)
        is_call = opens_all or inner.is_call(equation, is_mapped)
        if not (node.holds_target and is_call):
            outputs = tuple(Variable(var, call) for var in equation.outvars)
            yield dataclasses.replace(node, inputs=inputs, outputs=outputs)
            continue
        (called,) = node.programs
        number, opened = next(calls), called.opened
        variables = (Variable(var, number) for var in (*opened.constvars, *opened.invars))
        names.update(zip(variables, (*map(Constant, called.constants), *inputs), strict=True))
        yield from flat(called, number, names, calls, is_mapped=is_mapped)
        names.update(
            (Variable(var, call), value_of(out, number, names))
            for var, out in zip(equation.outvars, opened.outvars, strict=True)
        )


def kept_apart(nodes: Sequence[Node]) -> list[Node]:
    """Keep small sums exact that large ones need: they would wait, and split these into groups."""
    needed: set[Value] = set()  # by a sum to compress
    found = []
    for node in reversed(nodes):
        is_needed = not needed.isdisjoint(node.outputs)
        if node.may_join and is_needed:
            why = f"{node.why_exact}, and a large one needs it"
            node = dataclasses.replace(node, why_exact=why)
        if node.is_target or node.holds_target or is_needed:
            needed.update(node.inputs)
        found.append(node)
    return found[::-1]


def value_of(atom: Any, call: int, names: Mapping[Variable, Value]) -> Value:
    """Return the value of an input of an equation, or of an output of a program."""
    if isinstance(atom, Literal):
        return Constant(atom.val)
    variable = Variable(atom, call)
    return names.get(variable, variable)
