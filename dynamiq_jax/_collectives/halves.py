"""Halves of an all-reduce: a part of the sum for each worker, and the parts of all on every one."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import exact
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._buckets.order import after
from dynamiq_jax._collectives.collective import Collective, Leaves
from dynamiq_jax._core.validation import check_flag, is_integer
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax.methods import ChunkedMethod, Method, Reduced, State
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class _Half(Collective):
    """One half of an all-reduce, along a dimension of each leaf."""

    dimension: int = 0
    tiled: bool = False

    function: ClassVar[str]  # of the library, for errors

    def __post_init__(self) -> None:
        check_flag("tiled", self.tiled)

    @override
    def check_method(self, method: Method) -> None:
        checks.check_chunked(method, self.function)

    @override
    def multiple(self, bucket: Bucket) -> int:
        return bucket.method.granule


@dataclasses.dataclass(frozen=True)
class ReduceScatter(_Half):
    """Sum, of which every worker gets its part of a dimension."""

    function: ClassVar[str] = "dq.psum_scatter"

    @override
    def check(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
        dimension, workers, rank = self.dimension, self.axes.num_workers, leaf.ndim
        if not (is_integer(dimension) and -rank <= dimension < rank):
            remedy = f"one from {-rank} to {rank - 1}" if rank else "leaves with a dimension"
            raise ValueError(
                f"scatter_dimension={dimension!r} is not a dimension of tree{name}, of shape "
                f"{leaf.shape}. Give {remedy}."
            )
        size = leaf.shape[dimension]
        if size % workers or (not self.tiled and size != workers):
            wanted = f"a multiple of {workers}" if self.tiled else f"{workers}, or tiled=True"
            raise ValueError(
                f"tree{name} has shape {leaf.shape}, whose dimension {dimension} does not scatter "
                f"over {workers} workers. Give {wanted}."
            )
        checks.check_not_split(name, spec, self._dimension(leaf), "scatter_dimension")

    @override
    def rules(self, compression: Compression) -> CutRules:
        return CutRules(compression.bucketing, into_parts=False)

    @override
    def result_spec(self, leaf: Array, spec: PartitionSpec) -> PartitionSpec:
        if self.tiled:
            return spec
        split, dimension = list(spec), self._dimension(leaf)
        return PartitionSpec(*split[:dimension], *split[dimension + 1 :])

    @override
    def rows(self, leaf: Array) -> Array:
        moved = jnp.moveaxis(leaf, self._dimension(leaf), 0)
        return moved.reshape(self.axes.num_workers, -1)

    @override
    def shape(self, leaf: Array) -> tuple[int, ...]:
        dimension = self._dimension(leaf)
        part = [leaf.shape[dimension] // self.axes.num_workers] if self.tiled else []
        return (*leaf.shape[:dimension], *part, *leaf.shape[dimension + 1 :])

    @override
    def restore(self, rows: Array, leaf: Array) -> Array:
        dimension = self._dimension(leaf)
        others = [size for d, size in enumerate(leaf.shape) if d != dimension]
        moved = jnp.moveaxis(rows.reshape(-1, *others), 0, dimension)
        return moved.reshape(self.shape(leaf))

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        result = {}
        for index, leaf in leaves.items():
            wide = after(token, leaf).astype(exact.scattered_dtype(leaf.dtype))
            part = self.axes.slow.sum_scatter(wide, self._dimension(leaf), tiled=self.tiled)
            result[index] = part.astype(leaf.dtype)
        return result, [*result.values()]

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        call = dataclasses.replace(bucket.call.of_size(flat.size), collective="psum_scatter")
        assert isinstance(bucket.method, ChunkedMethod)
        return Reduced(*bucket.method.reduce_scatter(flat, call, key))

    def _dimension(self, leaf: Array) -> int:
        return self.dimension % leaf.ndim


@dataclasses.dataclass(frozen=True)
class AllGather(_Half):
    """Parts of all workers, on every worker."""

    last_first: bool = dataclasses.field(default=False, kw_only=True)
    salt: ClassVar[int | None] = 0x67617468
    function: ClassVar[str] = "dq.all_gather"

    @override
    def rules(self, compression: Compression) -> CutRules:
        # A forward pass can begin with the first leaves, whatever the topology of the transpose.
        into = "in_order" if compression.bucketing == "auto" else compression.bucketing
        return CutRules(into, into_parts=False)

    @property
    @override
    def result_rows(self) -> int:
        return self.axes.num_workers

    @override
    def check(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
        axis, rank = self.dimension, leaf.ndim if self.tiled else leaf.ndim + 1
        if not (is_integer(axis) and -rank <= axis < rank):
            remedy = f"Give one from {-rank} to {rank - 1}." if rank else "Give tiled=False."
            raise ValueError(
                f"axis={axis!r} is not a dimension that the parts of tree{name}, of shape "
                f"{leaf.shape}, can lie along. {remedy}"
            )
        if self.tiled:
            checks.check_not_split(name, spec, self._dimension(leaf), "axis")

    @override
    def check_values(self, name: str, leaf: Array) -> None:
        return None

    @override
    def result_spec(self, leaf: Array, spec: PartitionSpec) -> PartitionSpec:
        if self.tiled:
            return spec
        split = [*spec, *[None] * (leaf.ndim - len(spec))]
        split.insert(self._dimension(leaf), None)
        return PartitionSpec(*split)

    @override
    def planned(self, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((self.axes.num_workers, *leaf.shape), leaf.dtype)

    @override
    def shape(self, leaf: Array) -> tuple[int, ...]:
        shape, dimension, workers = list(leaf.shape), self._dimension(leaf), self.axes.num_workers
        if not self.tiled:
            return (*shape[:dimension], workers, *shape[dimension:])
        return (*shape[:dimension], workers * shape[dimension], *shape[dimension + 1 :])

    @override
    def restore(self, rows: Array, leaf: Array) -> Array:
        parts = rows.reshape(self.axes.num_workers, *leaf.shape)
        return jnp.moveaxis(parts, 0, self._dimension(leaf)).reshape(self.shape(leaf))

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        gathered = {
            index: self.axes.slow.gather(after(token, leaf)) for index, leaf in leaves.items()
        }
        result = {index: self.restore(rows, leaves[index]) for index, rows in gathered.items()}
        return result, [*gathered.values()]

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        whole = bucket.call.of_size(self.axes.num_workers * flat.size)
        call = dataclasses.replace(whole, collective="all_gather")
        assert isinstance(bucket.method, ChunkedMethod)
        gathered = bucket.method.all_gather(flat, call, key)
        return Reduced(gathered.decode(), gathered.token)

    def _dimension(self, leaf: Array) -> int:
        return self.dimension % (leaf.ndim if self.tiled else leaf.ndim + 1)
