"""Buckets that leaves are sorted into."""

import dataclasses

from dynamiq_jax import Compression
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import CutRules, Sorted, sort_leaves
from dynamiq_jax._core import Axis
from dynamiq_jax._inputs.request import resolve


def plan_of(
    leaves: list, axes: Axes = Axes(Axis("data", 4)), *, rules: CutRules | None = None, **choices
) -> Sorted:
    """Sort leaves, as an all-reduce does unless there are other rules."""
    request = resolve(Compression(**choices))
    rules = rules or CutRules(request.compression.bucketing)
    rules = dataclasses.replace(rules, names=tuple(f"leaf {i}" for i in range(len(leaves))))
    whole = [()] * len(leaves)
    methods = request.compression.policy.methods(leaves)
    return sort_leaves(leaves, axes, request, methods, split_over=whole, rules=rules)
