"""Report of the sums of a step that `compress` found."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax import lax

from dynamiq_jax._api.wire_report import plan_without_arrays
from dynamiq_jax._buckets import exact
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._rewriting.evaluate import Evaluation
from dynamiq_jax._rewriting.nodes import Choice
from dynamiq_jax._rewriting.schedule import Reduce
from dynamiq_jax._rewriting.sums import Sum, is_refused
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class SumReport:
    """Sum of a step, and the bytes that each worker sends for it."""

    sum: Sum
    why_exact: str | None  # None: compressed
    group: int | None  # sums of one group are one collective; None: it is as it was
    times: int | None  # that it runs in one call of the step; None if that is not known
    # Bytes over the slow axis, each time: of the step as it was, and as it is now; None if the sum
    # is not over that axis.
    bytes_before: int | None
    bytes_after: float | None

    @property
    def is_compressed(self) -> bool:
        """True if it is compressed."""
        return self.why_exact is None


@dataclasses.dataclass(frozen=True)
class CompressReport:
    """Sums of a step over mesh axes. As text, it is a table."""

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
        rows = [("sum", "shape", "dtype", "bytes before", "after", ""), *map(_row, self.sums)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if "bytes" in title or title == "after" else cell.ljust(width)
                for cell, width, title in zip(row, widths, rows[0], strict=True)
            ).rstrip()
            for row in rows
        )


def _row(each: SumReport) -> tuple[str, str, str, str, str, str]:
    known = [each.bytes_before, each.bytes_after]
    before, after = ("" if count is None else f"{count:,.0f}" for count in known)
    times = "" if each.times == 1 else f", {each.times or 'many'} times"
    kept = f"exact: {each.why_exact}" if each.why_exact else "compressed"
    group = "" if each.group is None else f", group {each.group}"
    shape = ",".join(map(str, each.sum.shape))
    source = each.sum.source.rpartition("/")[2]
    where = f"{each.sum.operation} {source}".strip()
    return where, f"[{shape}]", each.sum.dtype.name, before, after, f"{kept}{group}{times}"


def report_of(
    groups: Sequence[Reduce], left: Sequence[Choice], evaluation: Evaluation
) -> CompressReport:
    """Report the groups of a step and the sums that stay as they are."""
    sums = [each for group in groups for each in _of_group(group, evaluation)]
    sums += [SumReport(each, why, None, 1, None, None) for each, why in left if why]
    return CompressReport(tuple(sums))


def _of_group(group: Reduce, evaluation: Evaluation) -> list[SumReport]:
    members = group.members
    names = members[0].description.axes
    over = tuple(name for name in evaluation.selection.axes if name in names)
    sizes = tuple(group.sizes.get(name) or lax.axis_size(name) for name in over)
    described = [
        jax.ShapeDtypeStruct(each.description.shape, each.description.dtype) for each in members
    ]
    joint = [i for i, each in enumerate(members) if not is_refused(each.why_exact)]
    plan = plan_without_arrays(
        [described[i] for i in joint],
        sizes,
        evaluation.compression,
        collective=group.collective,
    )
    before = [_exact_bytes(group, plan.collective.axes, leaf) for leaf in described]
    after: list[float] = list(before)
    compressed = [0.0] * len(joint)
    for bucket in plan.buckets:
        whole = sum(math.prod(plan.parts[leaf].shape) for leaf in bucket.leaves)
        for leaf in bucket.leaves:
            share = math.prod(plan.parts[leaf].shape) / whole
            compressed[leaf] += share * _bucket_bytes(group, bucket, sizes[0])
    for leaf, i in enumerate(joint):
        after[i] = compressed[leaf] or before[i]
    return [
        SumReport(each.description, each.why_exact, group.number, group.times, was, now)
        for each, was, now in zip(members, before, after, strict=True)
    ]


def _bucket_bytes(group: Reduce, bucket: Bucket, num_workers: int) -> int:
    """Count the bytes that each worker sends over the slow axis for a bucket."""
    operation, topology = group.members[0].description.operation, bucket.call.topology
    if operation == "psum":
        return bucket.bytes_sent
    cost = bucket.method.wire_cost(dataclasses.replace(bucket.call, collective=operation))
    match operation:
        case "psum_scatter":
            return cost.statistics_bytes + topology.bytes_scattered(cost, num_workers)
        case "all_gather":
            return cost.statistics_bytes + (num_workers - 1) * cost.payload_bytes


def _exact_bytes(group: Reduce, axes: Axes, leaf: jax.ShapeDtypeStruct) -> int:
    """Count the bytes that each worker sends for a leaf without compression."""
    workers, size = axes.num_workers, math.prod(leaf.shape)
    match group.members[0].description.operation:
        case "psum":
            return exact.bytes_sent(axes, [leaf])
        case "psum_scatter":
            return (workers - 1) * size * leaf.dtype.itemsize // workers
        case "all_gather":
            return (workers - 1) * size * leaf.dtype.itemsize
