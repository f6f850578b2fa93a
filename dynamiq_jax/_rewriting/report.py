"""Report of the sums of a step that `compress` found."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax import lax

from dynamiq_jax._buckets import exact as exact_leaves
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._collectives.error_estimate import sample_bytes
from dynamiq_jax._core import Axis
from dynamiq_jax._core.text import aligned, short_name
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._plan.without_arrays import plan_without_arrays
from dynamiq_jax._rewriting.steps import KeptSum, Reduce
from dynamiq_jax._rewriting.sums import ZEROS, Operation, Sum
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class SumReport:
    """Sum of a step, and the bytes that each worker sends for it."""

    sum: Sum
    why_exact: str | None  # None: compressed
    group: int | None  # sums of one group are one collective; None: it is as it was
    times: int | None  # that it runs in one call of the step; None if that is not known
    # Bytes over the slow axis, each time: of the step as it was, and as it is now. None if the sum
    # is not over that axis, or if they are not known: of an exact sum over groups of the axis, of a
    # symbolic shape, or of terms that the compiler splits.
    bytes_before: int | None
    bytes_after: float | None

    @property
    def is_compressed(self) -> bool:
        """True if it is compressed."""
        return self.why_exact is None


@dataclasses.dataclass(frozen=True)
class CompressReport:
    """Sums of a step over mesh axes.

    As text, it is a table, in which sums that are alike are one row with their number. A sentence
    says that none is compressed.
    """

    sums: tuple[SumReport, ...]

    @property
    def compressed(self) -> tuple[SumReport, ...]:
        """Sums that are compressed."""
        return tuple(each for each in self.sums if each.is_compressed)

    @property
    def num_groups(self) -> int:
        """Compressed collectives of the step, each of one group of sums."""
        return len({each.group for each in self.compressed})

    @override
    def __str__(self) -> str:
        if not self.sums:
            return "Nothing is compressed: the step has no sum over a named axis."
        counted = collections.Counter(map(_row, self.sums))  # in the order of the step
        number = [f"{count} x" if count > 1 else "" for count in counted.values()]
        rows: list[tuple[str, ...]] = [_TITLES, *counted]
        if any(number):
            rows = [(first, *row) for first, row in zip(["", *number], rows, strict=True)]
        numbers = [rows[0].index(title) for title in ("bytes before", "after")]
        lines = aligned(rows, right=numbers)
        if not self.compressed:
            lines.append("Nothing is compressed: each of these sums stays exact.")
        return "\n".join(lines)


_TITLES = ("sum", "shape", "dtype", "bytes before", "after", "")


def _row(each: SumReport) -> tuple[str, str, str, str, str, str]:
    known = [each.bytes_before, each.bytes_after]
    before, after = ("" if count is None else f"{count:,.0f}" for count in known)
    times = "" if each.times == 1 else f", {each.times or 'many'} times"
    kept = f"exact: {each.why_exact}" if each.why_exact else "compressed"
    group = "" if each.group is None else f", group {each.group}"
    shape = ",".join(map(str, each.sum.shape))
    file, *line = re.split(r"(?=:\d)", each.sum.source, maxsplit=1)
    where = f"{each.sum.operation} {short_name(file)}{''.join(line)}".strip()
    return where, f"[{shape}]", each.sum.dtype.name, before, after, f"{kept}{group}{times}"


def report_of(
    groups: Iterable[Reduce], exact: Iterable[KeptSum], axes: tuple[str, ...], request: Request
) -> CompressReport:
    """Report the groups of a step and the sums that stay as they are.

    Args:
      groups: the groups.
      exact: other sums.
      axes: names of axes that are compressed over, slowest first.
      request: how to compress.
    """
    sums = [each for group in groups for each in _of_group(group, request)]
    sums += [_of_kept(each, axes) for each in exact]
    return CompressReport(tuple(sums))


def _of_kept(kept: KeptSum, axes: tuple[str, ...]) -> SumReport:
    """Report a sum that stays as it is."""
    each, sizes, sent = kept.description, kept.sizes, None
    over = [name for name in axes if name in each.axes]
    is_over_slow = over[:1] == [axes[0]]
    if sizes is not None and is_over_slow and all(isinstance(size, int) for size in each.shape):
        slow, *fast = (Axis(name, sizes.get(name) or lax.axis_size(name)) for name in over)
        leaf = jax.ShapeDtypeStruct(each.shape, each.dtype)
        sent = _bytes_before(each.operation, Axes(slow, tuple(fast)), leaf)
    after = 0 if kept.why == ZEROS else sent
    return SumReport(each, kept.why, None, kept.times, sent, after)


def _of_group(group: Reduce, request: Request) -> list[SumReport]:
    """Report the sums of a group, with the bytes and the reasons of its plan."""
    described = [
        jax.ShapeDtypeStruct(each.sent_shape, each.description.dtype) for each in group.members
    ]
    plan = _plan_of(group, group.by_path(described), request)
    whys = dict(plan.exact)
    axes = plan.collective.axes
    parts = [plan.shards.local(i, leaf) for i, leaf in enumerate(described)]
    before = [_bytes_before(group.operation, axes, part) for part in parts]
    exactly = {i: _exact_bytes(group.operation, axes, part) for i, part in enumerate(parts)}
    compressed: dict[int, float] = collections.defaultdict(float)
    for bucket in plan.buckets:
        sent = _bucket_bytes(group, bucket, axes, request.estimates)
        for leaf, share in plan.bytes_by_leaf(bucket, sent).items():
            compressed[leaf] += share
    after = {**exactly, **compressed}
    return [
        SumReport(
            each.description,
            each.why_exact or whys.get(i),
            group.number,
            group.around.times,
            before[i],
            after[i],
        )
        for i, each in enumerate(group.members)
    ]


def _plan_of(group: Reduce, tree: dict[str, Any], request: Request) -> Plan:
    over: Any = group.over
    mesh = group.workers.mesh if group.workers else group.around.mesh
    mesh = mesh or jax.sharding.get_abstract_mesh()
    specs = group.specs(request)
    if specs is None or not set(over) <= set(mesh.axis_names):  # also axes of jax.vmap
        over = tuple(group.sizes.get(name) or lax.axis_size(name) for name in over)
        mesh = specs = None
    request = request.with_specs(specs)
    return plan_without_arrays(tree, over, request, mesh=mesh, collective=group.collective)


def _bucket_bytes(group: Reduce, bucket: Bucket, axes: Axes, estimates: bool) -> int:
    """Count the bytes that each worker sends over the slow axis for a bucket."""
    if group.operation == "psum":
        return bucket.bytes_sent + (sample_bytes(bucket, axes) if estimates else 0)
    cost = bucket.method.wire_cost(dataclasses.replace(bucket.call, collective=group.operation))
    match group.operation:
        case "psum_scatter":
            scattered = bucket.call.topology.bytes_scattered(cost, axes.slow.size)
            return cost.statistics_bytes + scattered
        case "all_gather":
            return cost.statistics_bytes + (axes.slow.size - 1) * cost.payload_bytes


def _exact_bytes(operation: Operation, axes: Axes, leaf: jax.ShapeDtypeStruct) -> int:
    """Count the bytes that each worker sends for a leaf that stays exact in a group."""
    if operation == "psum":
        return exact_leaves.bytes_sent(axes, [leaf])
    if operation == "psum_scatter":
        leaf = leaf.update(dtype=exact_leaves.scattered_dtype(leaf.dtype))
    return _bytes_before(operation, axes, leaf)


def _bytes_before(operation: Operation, axes: Axes, leaf: jax.ShapeDtypeStruct) -> int:
    """Count the bytes that each worker sends over the slow axis for a leaf in its own dtype, as in
    the step as it was.
    """
    others, leaf_bytes = axes.slow.size - 1, math.prod(leaf.shape) * leaf.dtype.itemsize
    match operation:
        case "psum":
            return round(axes.passes * leaf_bytes)
        case "psum_scatter":
            return others * leaf_bytes // axes.num_workers
        case "all_gather":
            return others * leaf_bytes
