"""Linear equations of sums, done in front of the sums: there are fewer sums then, or smaller ones.

So the gradients of a parameter that a loss uses several times are one sum, that of a bias is as
large as the bias, and a sum over the turns of a loop leaves the loop.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamiq_jax._rewriting import unreduced
from dynamiq_jax._rewriting.nodes import Constant, Node, Value
from dynamiq_jax._rewriting.steps import Compute, Member
from dynamiq_jax._rewriting.sums import NOT_FLOATING, SMALL, Selection
from pallas_kernels._jax import equations

_OF_ONE = {
    *("broadcast_in_dim", "convert_element_type", "copy", "neg", "pad", "reduce_sum", "reshape"),
    *("squeeze", "transpose"),
}
_OF_SEVERAL = {"add", "add_any", "sub"}
_CONSTRAINTS = {"reshard", "sharding_constraint"}
_RESHAPING = {"broadcast_in_dim", "concatenate", "pad"}
_BY_A_NUMBER = {"mul", "div"}  # such as the division of a mean
# Others are done in front of sums that the compiler places alone: the sums of a map stand where
# their author has put them.
_OF_ANY_SUM = {"add", "add_any", "reduce_sum", "reshape", "squeeze", "transpose"} | _BY_A_NUMBER


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Sums of a program that wait, and what decides whether others may come in front of them."""

    selection: Selection
    uses: Mapping[Value, int]  # number of uses of each value
    carries: Mapping[Value, int]  # inputs of a loop's body that are regarded as terms of a sum
    added: Collection[Value]  # values that are added to sums
    may_leave: bool  # whether sums may leave the program
    # By their results: the sums, and the equations that make them.
    sums: dict[Value, Member] = dataclasses.field(default_factory=dict)
    nodes: dict[Value, Node] = dataclasses.field(default_factory=dict)

    def add(self, node: Node, members: Iterable[Member]) -> None:
        """Add sums of an equation."""
        for member in members:
            self.sums[member.result], self.nodes[member.result] = member, node

    def in_front(self, node: Node, waiting: Collection[Value]) -> Compute | None:
        """Replace sums that wait by the one of the results of an equation that needs them, and
        return the step of the equation, which is of terms then; None if it has to wait, too.

        Values that are `waiting` are not available.
        """
        name, keys = node.equation.primitive.name, _linear_inputs(node)
        if not keys or any(self.uses[key] > 1 for key in keys):
            return None
        members = [self.sums[key] for key in keys if key in self.sums]
        carried = [self.carries[key] for key in keys if key in self.carries]
        if not members or len(members) + len(carried) < len(keys):
            return None
        first = members[0]
        if first.workers is None and name not in _OF_ANY_SUM:
            return None
        is_psum = first.description.operation == "psum"
        is_unreduced = "dst_sharding" in first.params  # linear equations have rules of their own
        if not is_psum or is_unreduced or any(each.kind != first.kind for each in members):
            return None
        others = [key for key in node.inputs if key not in keys and not isinstance(key, Constant)]
        # A number of a program of one worker may differ on the others. Zeros do not.
        may_differ = first.workers is None and name not in _OF_SEVERAL
        if others and (may_differ or not set(others).isdisjoint(waiting)):
            return None
        if not self._gains(node, members):
            return None
        out = node.equation.outvars[0]
        member = resized(self.selection, members, equations.shape_of(out), equations.dtype_of(out))
        if member is None:
            return None
        inputs, result = node.variables, node.outputs[0]
        operands = [self.sums[key].operand if key in self.sums else key for key in inputs]
        if first.workers is None:
            function = _function_of(node)
        else:
            are_terms = [key in keys for key in inputs]
            function = unreduced.linear(node.equation, are_terms, first.workers)
        accumulates = frozenset(carried).union(*(each.accumulates for each in members))
        moved = dataclasses.replace(
            member, operand=result.terms, result=result, accumulates=accumulates
        )
        for key in keys:
            self.sums.pop(key, None)
        self.add(node, [moved])
        return Compute(function, tuple(operands), (result.terms,))

    def _gains(self, node: Node, members: Sequence[Member]) -> bool:
        """Return whether fewer or smaller sums are left.

        Terms are rounded, and exact sums change their rounding, for no other reason.
        """
        name = node.equation.primitive.name
        before, after = (
            math.prod(equations.shape_of(atom))
            for atom in (node.equation.invars[0], node.equation.outvars[0])
        )
        is_compressed = any(each.why_exact is None for each in members)
        if name in _BY_A_NUMBER | _RESHAPING or name == "sharding_constraint":
            return self.may_leave or (name in _BY_A_NUMBER and node.outputs[0] in self.added)
        if name in ("convert_element_type", "reduce_sum"):
            return is_compressed or self.may_leave or (name == "reduce_sum" and before == after)
        return True


def _linear_inputs(node: Node) -> Sequence[Value]:
    """Return the inputs in which an equation is linear if all others are numbers; or else none."""
    name, keys = node.equation.primitive.name, node.inputs
    if name in _OF_SEVERAL:  # a total may begin with zeros
        return [key for key, each in zip(keys, node.operands, strict=True) if each.number != 0]
    if name == "concatenate":
        return keys
    if name == "convert_element_type" and not _is_widened(node):
        return ()
    if name in _CONSTRAINTS and node.sum is None:
        return keys
    if name == "pad":
        return keys[:1] if node.operands[1].number == 0 else ()
    if name in _OF_ONE and len(keys) == 1:
        return keys
    # Terms of 16 bits may be too small to be divided.
    if name not in _BY_A_NUMBER or equations.dtype_of(node.equation.outvars[0]).itemsize < 4:
        return ()
    first, second = keys
    are_numbers = [not equations.shape_of(atom) for atom in node.equation.invars]
    if are_numbers[1]:
        return () if are_numbers[0] else (first,)
    return (second,) if name == "mul" and are_numbers[0] else ()


def _is_widened(node: Node) -> bool:
    """Return whether floating numbers are converted to others that hold them all."""
    before, after = (
        equations.dtype_of(atom) for atom in (node.equation.invars[0], node.equation.outvars[0])
    )
    if not all(jnp.issubdtype(each, jnp.floating) for each in (before, after)):
        return False
    narrow, wide = jnp.finfo(before), jnp.finfo(after)
    return bool(narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp)


def _function_of(node: Node) -> Callable[..., Sequence[Any]]:
    """Return the function of a linear equation, of its inputs that are variables."""
    name = node.equation.primitive.name
    # Terms vary over the axes of the sum. Numbers have to, too: functions of `jax.lax` see to it.
    sums = {"add": lax.add, "add_any": lax.add, "sub": lax.sub}
    function = {"mul": lax.mul, "div": lax.div, **sums}.get(name)
    if function is None:
        return functools.partial(equations.evaluate, node.equation)
    return lambda *values: [function(*equations.with_literals(node.equation, values))]


def resized(
    selection: Selection,
    members: Sequence[Member],
    shape: tuple[int, ...],
    dtype: np.dtype[Any] | None = None,
) -> Member | None:
    """Merge sums of one kind, whose terms are combined, into one of a shape and a dtype. It has no
    operand yet. None if they cannot be merged.
    """
    first = members[0]
    whys = {each.why_exact for each in members}
    origins = {each.description.origin for each in members}
    if not whys <= {None, SMALL} or (SMALL in whys and len(origins) > 1):
        return None  # a small sum may be a part of a large one then, for which its origin counts
    dtype = dtype or first.description.dtype
    described = dataclasses.replace(first.description, shape=shape, dtype=dtype)
    why: str | None = SMALL
    if not selection.is_small(described, first.params):
        # A rule of the user has seen the large ones already.
        why = None if None in whys else selection.why_exact(described, first.params)
    if why not in (None, SMALL):
        return None
    return dataclasses.replace(first, description=described, why_exact=why)


def behind(selection: Selection, member: Member, shape: tuple[int, ...]) -> Member | None:
    """Return a sum of one turn, done behind the equation that holds it, where all turns have a
    shape; None if it has to stay inside.
    """
    member = dataclasses.replace(member, accumulates=frozenset())
    if member.why_exact != NOT_FLOATING:
        return resized(selection, [member], shape)
    described = dataclasses.replace(member.description, shape=shape)
    return dataclasses.replace(member, description=described)


def totals_among(left: Mapping[int, Member]) -> set[int]:
    """Return the outputs of a loop's body that only accumulate sums which leave the body."""
    inside = [(output, member) for member in left.values() for output in member.accumulates]
    return {
        output
        for output, _ in inside
        if output in left and all(m.kind == left[output].kind for o, m in inside if o == output)
    }


def added_to_sums(
    nodes: Sequence[Node], uses: Mapping[Value, int], totals: Collection[Value]
) -> set[Value]:
    """Return the values that are added to sums, or to inputs of a loop's body which may be totals,
    as they are or times numbers.

    Args:
      nodes: equations of the program.
      uses: number of uses of each value.
      totals: the inputs that may be totals.
    """
    sums: set[Value] = {value for value in totals if uses[value] == 1}
    added: set[Value] = set()
    for node in nodes:
        linear = _linear_inputs(node)
        is_linear = bool(linear) and all(key in sums for key in linear)
        if is_linear or node.is_target or node.may_join or node.holds_target:
            sums.update(node.outputs)
        if is_linear and node.equation.primitive.name in _OF_SEVERAL:
            added.update(linear)
    for node in reversed(nodes):
        if node.equation.primitive.name in _BY_A_NUMBER and node.outputs[0] in added:
            added.update(key for key in _linear_inputs(node) if key not in totals)
    return added
