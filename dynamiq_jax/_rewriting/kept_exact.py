"""Sums that stay exact for what is done with their results: the surroundings of a sum decide."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dynamiq_jax._rewriting.nodes import Key, Node
from dynamiq_jax._rewriting.sums import OF_GRADIENTS, STATISTICS, differentiation_of

# Equations of a backward pass that may stand between a gradient and its use, and change no more
# than its form.
_OF_FORM = {"reshape", "squeeze", "transpose", "add_any", "convert_element_type", "copy", "mul"}
_TO_VARYING = {"pcast", "pvary"}


def keep_exact(
    nodes: Sequence[Node],
    needed_outputs: Collection[Key],
    summed_outputs: Collection[Key],
    carried: Sequence[tuple[Key, Key]],
) -> None:
    """Keep sums exact with which a backward pass goes on, and small ones that large ones need.

    The first are gradients of statistics of the batch. The others would wait, and split the large
    ones into groups.

    Args:
      nodes: equations of a program; their choices change, and `needed` and `summed` are set.
      needed_outputs: outputs of the program with which the backward pass of its caller goes on.
      summed_outputs: outputs of the program that its caller sums behind its backward pass.
      carried: outputs of a program that is the body of a loop, with the inputs that they replace.
    """
    needed_backward, summed = set(needed_outputs), set(summed_outputs)
    while True:
        found = _find(nodes, needed_backward, summed)
        again = {output for output, value in carried if value in found.needed}
        summed_again = {output for output, value in carried if value in found.summed}
        if again <= needed_backward and summed_again <= summed:
            break
        needed_backward |= again
        summed |= summed_again
    needed: set[Key] = set()  # by a sum to compress, through any equations
    for node in reversed(nodes):
        results = set(node.outputs)
        if node.sums and _is_backward(node) and results & found.needed:
            node.sums = [(each, STATISTICS) for each, _ in node.sums]
        elif node.may_join and results & needed:
            node.sums = [(each, f"{why}, and a large one needs it") for each, why in node.sums]
        node.needed = {i for i, output in enumerate(node.outputs) if output in found.needed}
        node.summed = {i for i, output in enumerate(node.outputs) if output in found.summed}
        if node.is_target or node.holds_target or results & needed:
            needed.update(node.inputs)


class _Found(NamedTuple):
    """Values of a program by what is done with them."""

    needed: set[Key]  # a sum of a gradient needs them, through equations of one backward pass
    summed: set[Key]  # a sum behind the backward pass needs them


def _find(nodes: Sequence[Node], needed: Collection[Key], summed: Collection[Key]) -> _Found:
    """Find what is done with the values of a program.

    Args:
      nodes: equations of the program.
      needed: outputs of the program that are needed by a sum in the backward pass of its caller.
      summed: outputs of the program that its caller sums behind its backward pass.
    """
    found = _Found(set(needed), set(summed))
    far: set[Key] = set()  # as `summed`, but the backward pass itself does something with them
    for node in reversed(nodes):
        results = set(node.outputs)
        has_sum = node.holds_sum or any(why in OF_GRADIENTS for _, why in node.sums)
        is_summed = bool(results & (found.summed | far))
        if not _is_backward(node):
            if differentiation_of(node.scopes) is None and (has_sum or is_summed):
                found.summed.update(node.inputs)
            continue
        name = node.equation.primitive.name
        if has_sum or results & found.needed:
            found.needed.update(node.inputs)
        if results & far and name == "psum":
            # Without check_vma, a backward pass sums nothing else than gradients of sums.
            found.needed.update(results)
        elif is_summed and name in _TO_VARYING:
            found.needed.update(node.inputs)
        elif is_summed and not has_sum:
            is_near = name in _OF_FORM and not results & far
            (found.summed if is_near else far).update(node.inputs)
    return found


def _is_backward(node: Node) -> bool:
    return differentiation_of(node.scopes) == "backward"
