"""Linear equations of sums, done in front of the sums: there are fewer sums then, or smaller ones.

So the gradients of a parameter that a loss uses several times are one sum, that of a bias is as
large as the bias, and a sum over the turns of a loop leaves the loop.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dynamiq_jax._rewriting.nodes import Constant, Key, Node, SumTerms, Value
from dynamiq_jax._rewriting.steps import Evaluate, Member
from dynamiq_jax._rewriting.sums import NOT_FLOATING, SMALL, Selection
from pallas_kernels._jax import equations

_OF_ONE = {"reshape", "squeeze", "transpose", "reduce_sum"}
_OF_SEVERAL = {"add", "add_any"}
_BY_A_NUMBER = {"mul", "div"}  # such as the division of a mean


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Sums of a program that wait, and what decides whether others may come in front of them."""

    selection: Selection
    uses: Mapping[Key, int]  # number of uses of each value
    carries: Mapping[Key, int]  # inputs of a loop's body that are regarded as terms of a sum
    may_leave: bool  # whether sums may leave the program
    sums: dict[Key, Member] = dataclasses.field(default_factory=dict)  # by their results

    def in_front(self, node: Node) -> tuple[Evaluate, Member] | None:
        """Return the step of an equation of terms in place of sums, and the sum of its results.

        Args:
          node: equation that needs a sum that waits.
        """
        name, keys = node.equation.primitive.name, _linear_inputs(node)
        if not keys or any(self.uses[key] > 1 for key in keys):
            return None
        members = [self.sums[key] for key in keys if key in self.sums]
        carried = [self.carries[key] for key in keys if key in self.carries]
        if not members or len(members) + len(carried) < len(keys):
            return None
        first = members[0]
        is_psum = first.description.operation == "psum"
        is_unreduced = "dst_sharding" in first.params  # linear equations have rules of their own
        if not is_psum or is_unreduced or any(each.kind != first.kind for each in members):
            return None
        if name == "reduce_sum" and not self._may_shrink(node, first):
            return None
        if name in _BY_A_NUMBER and not self.may_leave:  # terms would be rounded for nothing
            return None
        shape = equations.shape_of(node.equation.outvars[0])
        member = resized(self.selection, members, shape)
        if member is None:
            return None
        terms = {key: member.operand for key, member in self.sums.items()}
        operands = {
            variable: terms.get(key, key)
            for variable, key in zip(node.equation.invars, node.inputs, strict=True)
            if key in keys
        }
        result = node.outputs[0]
        made = SumTerms(result)
        step = Evaluate(_function_of(node), tuple(operands.values()), (made,))
        accumulates = frozenset(carried).union(*(each.accumulates for each in members))
        moved = dataclasses.replace(member, operand=made, result=result, accumulates=accumulates)
        return step, moved

    def _may_shrink(self, node: Node, member: Member) -> bool:
        """Return whether a sum over dimensions is done first.

        Outside of loops, an exact sum would gain nothing, and change its rounding.
        """
        before, after = (
            math.prod(equations.shape_of(atom))
            for atom in (node.equation.invars[0], node.equation.outvars[0])
        )
        return member.why_exact is None or self.may_leave or before == after


def _linear_inputs(node: Node) -> Sequence[Key]:
    """Return the inputs in which an equation is linear, of which the others are numbers; none if it
    is not linear.
    """
    name, keys = node.equation.primitive.name, node.inputs
    if name in _OF_SEVERAL or (name in _OF_ONE and len(keys) == 1):
        return keys
    # Terms of 16 bits may be too small to be divided.
    if name not in _BY_A_NUMBER or equations.dtype_of(node.equation.outvars[0]).itemsize < 4:
        return ()
    first, second = keys
    if _is_number(second):
        return () if _is_number(first) else (first,)
    return (second,) if name == "mul" and _is_number(first) else ()


def _function_of(node: Node) -> Callable[..., Sequence[Any]]:
    """Return the function of a linear equation."""
    name = node.equation.primitive.name
    if name not in _BY_A_NUMBER:
        return equations.evaluated(node.equation)
    # Terms vary over the axes of the sum. The number has to, too: functions of `jax.lax` see to it.
    function = lax.mul if name == "mul" else lax.div
    values = [key.value if isinstance(key, Constant) else None for key in node.inputs]
    return lambda terms: [function(*(terms if each is None else each for each in values))]


def _is_number(key: Key) -> bool:
    """Return whether a value is a constant number."""
    if not isinstance(key, Constant) or isinstance(key.value, jax.core.Tracer):
        return False
    is_key = jnp.issubdtype(jnp.result_type(key.value), jax.dtypes.extended)
    return np.ndim(key.value) == 0 and not is_key


def resized(
    selection: Selection, members: Sequence[Member], shape: tuple[int, ...]
) -> Member | None:
    """Return a sum in place of others whose terms are combined, before it has its operand.

    Args:
      selection: rule for the sums to compress.
      members: sums of one kind.
      shape: shape of the combined terms.

    Returns:
      The sum; None if they cannot be combined.
    """
    first = members[0]
    whys = {each.why_exact for each in members}
    if not whys <= {None, SMALL}:
        return None
    described = dataclasses.replace(first.description, shape=shape)
    why: str | None = SMALL
    if not selection.is_small(described, first.params):
        # A rule of the user has seen the large ones already.
        why = None if None in whys else selection.why_exact(described, first.params)
    if why not in (None, SMALL):
        return None
    return dataclasses.replace(first, description=described, why_exact=why)


def behind(selection: Selection, member: Member, shape: tuple[int, ...]) -> Member | None:
    """Return a sum that is done behind the equation that holds it; None if it has to stay inside.

    Args:
      selection: rule for the sums to compress.
      member: sum of one turn.
      shape: shape of the sums of all turns.
    """
    member = dataclasses.replace(member, accumulates=frozenset())
    if member.why_exact != NOT_FLOATING:
        return resized(selection, [member], shape)
    described = dataclasses.replace(member.description, shape=shape)
    return dataclasses.replace(member, description=described)


def totals_among(left: Mapping[int, Member]) -> set[int]:
    """Return the outputs of a loop's body that are totals of terms: sums, as all that they are in.

    Args:
      left: sums that leave the body, by the number of the output.
    """
    inside = [(output, member) for member in left.values() for output in member.accumulates]
    return {
        output
        for output, _ in inside
        if output in left and all(m.kind == left[output].kind for o, m in inside if o == output)
    }


def totals_of_turns(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    uses: Mapping[Key, int],
    carried: Mapping[int, int],
) -> dict[Key, int]:
    """Return the inputs of a loop's body to which each turn may only add terms of a sum.

    Args:
      nodes: equations of the body.
      inputs: inputs of the body.
      uses: number of uses of each value.
      carried: inputs that the next turn takes, by the numbers of outputs that begin at zero.

    Returns:
      Numbers of the outputs, by the inputs that they replace.
    """
    sums: set[Key] = {inputs[place] for place in carried.values() if uses[inputs[place]] == 1}
    added: set[Key] = set()
    for node in nodes:
        linear = _linear_inputs(node)
        is_linear = bool(linear) and all(key in sums for key in linear)
        if is_linear or node.is_target or node.may_join or node.holds_target:
            sums.update(node.outputs)
        if is_linear and node.equation.primitive.name in _OF_SEVERAL:
            added.update(linear)
    return {
        inputs[place]: number
        for number, place in carried.items()
        if uses[inputs[place]] == 1 and inputs[place] in added
    }
