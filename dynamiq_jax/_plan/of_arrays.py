"""Plans of collectives inside of a program, from its arrays."""

from typing import Any

from jax import Array

from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._inputs.checks import named_leaves
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._inputs.shards import find_shards
from dynamiq_jax._plan.plan import Plan, make_plan


def plan_tree(
    collective: Collective, tree: Any, request: Request
) -> tuple[Plan, tuple[Array, ...]]:
    """Plan a call inside a program, and return the plan with the leaves of the tree."""
    named, _ = named_leaves(tree)
    leaves = tuple(leaf for _, leaf in named)
    shards = find_shards([name for name, _ in named], leaves, tree, request.compression.specs)
    return make_plan(collective, tree, named, shards, request), leaves
