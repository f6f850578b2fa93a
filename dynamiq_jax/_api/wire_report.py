"""Bytes of an all-reduce on the wire, without running it."""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

from dynamiq_jax._buckets import exact
from dynamiq_jax._collectives.error_estimate import sample_bytes
from dynamiq_jax._core.naming import spelled
from dynamiq_jax._core.text import aligned
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.policy import paths_of
from dynamiq_jax._inputs.request import Request, resolve
from dynamiq_jax._plan.without_arrays import plan_without_arrays
from dynamiq_jax.methods import Method
from pallas_kernels._jax.compat import override


class LeafReport(NamedTuple):
    """Static cost of one leaf in an all-reduce."""

    path: str  # as a policy has it, such as "layers/0/kernel"
    size: int  # coordinates, of a device's shard
    method: Method | None  # None: summed exactly
    bytes: float  # sent by each worker over the slow axis: its share of the bytes of its buckets
    why_exact: str | None  # None: compressed
    buckets: tuple[int, ...] = ()  # numbers of its buckets, as in the metric `worst_bucket`


@dataclasses.dataclass(frozen=True)
class WireReport:
    """Static cost of one all-reduce.

    As text, it is a table of the leaves.
    """

    bytes_per_worker: int  # sent by each worker over the slow axis, statistics included
    compressed_bytes: int  # of these, for compressed leaves
    exact_bytes: int  # of these, for leaves that are summed exactly
    sample_bytes: int  # of these, for estimates of errors
    check_bytes: int  # of these, to check that states belong to their workers
    fast_bytes: int  # sent by each worker besides, over fast axes, for compressed leaves alone
    compressed_size: int  # coordinates that are compressed
    bits: float  # bits per compressed coordinate in one pass over the link; nan if there is none
    ratio_f32: float  # bytes of a float32 all-reduce of the tree / bytes_per_worker; nan if 0
    ratio_bf16: float  # the same against bfloat16
    # Every leaf; reports of other methods that send as much are equal.
    leaves: tuple[LeafReport, ...] = dataclasses.field(compare=False, repr=False)

    @override
    def __str__(self) -> str:
        rows = [("leaf", "size", "method", "bytes")]
        for leaf in self.leaves:
            shown = f"exact: {leaf.why_exact}" if leaf.method is None else spelled(leaf.method)
            rows.append((leaf.path, f"{leaf.size:,}", shown, f"{leaf.bytes:,.0f}"))
        size = sum(leaf.size for leaf in self.leaves)
        rows.append(("all", f"{size:,}", "", f"{self.bytes_per_worker:,}"))
        return "\n".join(aligned(rows, right=(1, 3)))


def wire_report(
    tree: Any,
    axis_size: int | str | tuple[int | str, ...],
    method: Choice = Compression(),
    *,
    mesh: Any = None,
    with_metrics: bool = False,
) -> WireReport:
    """Count the bytes that `psum` or `pmean` of a tree puts on the wire, without running it.

    The counts equal the collectives of the compiled program. An exact leaf
    over several axes is one collective there. It is counted as what a sum by parts sends over the
    slow axis, as `method="exact"` does it. A step of `compress` has a report of its own.

    Args:
      tree: pytree of arrays or `jax.ShapeDtypeStruct`.
      axis_size: number of workers, or the sizes of several axes, slowest link first; with a mesh,
        the name of its axis, or the names of several.
      method: how to compress; see `psum`. With specs, bytes are counted for one device and its own
        shards. A bucket above `max_error` is sent again, which is not counted.
      mesh: `jax.sharding.Mesh` or `jax.sharding.AbstractMesh`, for leaves with specs.
      with_metrics: whether the exact sum of a sample, which metrics need, is counted.

    >>> import jax, jax.numpy as jnp
    >>> report = wire_report({"w": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}, 8)
    >>> round(report.bits, 1), round(report.ratio_bf16, 1)
    (5.0, 3.2)
    """
    request = resolve(method, measures=with_metrics)
    return report_of(request, tree, axis_size, mesh=mesh)


def report_of(request: Request, tree: Any, axis_size: Any, *, mesh: Any = None) -> WireReport:
    """Count bytes; see `wire_report`."""
    plan = plan_without_arrays(tree, axis_size, request, mesh=mesh)
    axes, leaves = plan.collective.axes, plan.parts
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    whys = dict(plan.exact)
    numbers: dict[int, tuple[int, ...]] = collections.defaultdict(tuple)
    bytes_of: dict[int, float] = collections.defaultdict(float)
    bytes_of |= {index: exact.bytes_sent(axes, [leaves[index]]) for index in whys}
    for number, bucket in enumerate(plan.buckets):
        for index, sent in plan.bytes_by_leaf(bucket, bucket.bytes_sent).items():
            bytes_of[index] += sent
            numbers[index] += (number,)
    compressed = sum(bucket.bytes_sent for bucket in plan.buckets)
    compressed_size = sum(sizes[index] for index in numbers)
    exactly = exact.bytes_sent(axes, [leaves[index] for index in whys])
    sampled = sum(sample_bytes(bucket, axes) for bucket in plan.buckets) if request.estimates else 0
    checked = exact.bytes_of_owners(axes, [bucket.method for bucket in plan.buckets])
    total = compressed + exactly + sampled + checked
    coordinates = axes.passes * sum(sizes[index] for index in plan.touched)
    # Each axis divides what the one before left; together they leave one part. Sums of parts are
    # float32, and what is gathered has the dtype of the bucket.
    fast = [one.call.size * (axes.num_fast - 1) * (4 + one.dtype.itemsize) for one in plan.buckets]
    return WireReport(
        bytes_per_worker=total,
        compressed_bytes=compressed,
        exact_bytes=exactly,
        sample_bytes=sampled,
        check_bytes=checked,
        fast_bytes=sum(fast),
        compressed_size=compressed_size,
        bits=8 * compressed / (axes.passes * compressed_size) if compressed_size else math.nan,
        ratio_f32=4 * coordinates / total if total else math.nan,
        ratio_bf16=2 * coordinates / total if total else math.nan,
        leaves=tuple(
            LeafReport(
                path,
                sizes[index],
                plan.methods[index] if index in numbers else None,
                bytes_of[index],
                whys.get(index),
                numbers.get(index, ()),
            )
            for index, path in enumerate(paths_of(tree))
            if index not in plan.untouched
        ),
    )
