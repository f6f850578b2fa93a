"""Specs of results from arguments that are alike, such as those of gradients from parameters.

They are used where nothing else tells how a sum of the compiler lies. A wrong one costs bytes, and
never a number.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dynamiq_jax._rewriting.arguments import Leaves


def specs_alike(
    results: Leaves, shapes: Sequence[Any], arguments: Leaves, specs: Sequence[PartitionSpec | None]
) -> dict[int, PartitionSpec]:
    """Return the specs of results from arguments of their shapes, by the numbers of the results.

    The argument counts whose path has the longest end in common with that of the result, such as
    `['layers']['kernel']`. Several of different specs tell nothing.

    Args:
      results: results of a step.
      shapes: shapes of their arrays.
      arguments: arguments of the step.
      specs: specs of their arrays, as far as they are known.
    """
    known = [
        (path, array.shape, spec)
        for path, array, spec in zip(_paths(arguments), arguments.arrays, specs, strict=False)
        if spec is not None
    ]
    found = {}
    for number, (path, shape) in enumerate(zip(_paths(results), shapes, strict=False)):
        alike = [(_common(path, other), spec) for other, of, spec in known if of == shape]
        most = max((count for count, _ in alike), default=0)
        best = {spec for count, spec in alike if count == most}
        if len(best) == 1:
            found[number] = best.pop()
    return found


def _paths(leaves: Leaves) -> list[tuple[Any, ...]]:
    """Return the paths of the arrays that are leaves."""
    tree = jax.tree.unflatten(leaves.structure, range(len(leaves.kinds)))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return list(leaves.of_arrays(paths))


def _common(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """Return the number of steps that two paths have in common at their ends."""
    pairs = list(zip(path[::-1], other[::-1], strict=False))
    return next((i for i, (one, two) in enumerate(pairs) if one != two), len(pairs))
