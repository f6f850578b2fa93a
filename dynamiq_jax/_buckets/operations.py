"""Collectives: layout of leaves, and transfer of a bucket of them."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import exact
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.order import after
from dynamiq_jax._buckets.plan import Bucket, Cuts
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.options import Options
from dynamiq_jax.methods import ChunkedMethod, Method, Reduced, State
from pallas_kernels.compat import override

Leaves = dict[int, Any]  # index in the flattened tree to leaf


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """A kind of collective over the workers of some axes."""

    axes: Axes

    # In a backward pass the gradients of the last leaves are available first.
    last_first: ClassVar[bool] = True
    # Whether errors of results can be estimated.
    can_estimate: ClassVar[bool] = False
    # Folded into the key, so that different kinds with the same key have different noise.
    salt: ClassVar[int | None] = None

    def check_method(self, method: Method) -> None:
        """Raise ValueError for a method that this collective cannot use."""
        return None

    def check(self, name: str, leaf: Array) -> None:
        """Raise ValueError for a leaf of a shape that this collective cannot use."""
        return None

    def check_values(self, name: str, leaf: Array) -> None:
        """Raise ValueError for a leaf that is summed already."""
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_not_reduced(name, leaf, self.axes.names)

    def check_shards(self, name: str, leaf: Array, spec: PartitionSpec) -> None:
        """Raise ValueError for a leaf whose shards this collective cannot work on alone."""
        return None

    def planned(self, leaf: Any) -> Any:
        """Return the leaf as the plan counts it: anything with `shape` and `dtype`."""
        return leaf

    @abc.abstractmethod
    def cuts(self, options: Options) -> Cuts:
        """Return how leaves are cut into buckets."""

    @property
    def result_rows(self) -> int:
        """Rows of the result, one for each worker whose values are in it."""
        return 1

    def rows(self, leaf: Array) -> Array:
        """Reshape a leaf to [rows, coordinates], one row for each worker that gets a part."""
        return leaf.reshape(1, -1)

    def multiple(self, bucket: Bucket) -> int:
        """Return the multiple of coordinates that rows of a bucket are padded to."""
        return bucket.method.granule

    @abc.abstractmethod
    def shape(self, leaf: Array) -> tuple[int, ...]:
        """Return the shape of the result of a leaf."""

    def result_spec(self, leaf: Array, spec: PartitionSpec) -> PartitionSpec:
        """Return how the result of a leaf is split over the axes of its shards."""
        return spec

    @abc.abstractmethod
    def restore(self, rows: Array, leaf: Array) -> Array:
        """Reshape result rows, [rows, coordinates], to the result of a leaf."""

    @abc.abstractmethod
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        """Run the exact collective once a token is available.

        Returns:
          Results by index, and what arrived: an array of each message.
        """

    @abc.abstractmethod
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        """Run the compressed collective of a bucket: rows that `restore` takes, of all leaves."""


@dataclasses.dataclass(frozen=True)
class WholeLeaves(Operation):
    """Collective whose result has the shapes of the leaves."""

    @override
    def multiple(self, bucket: Bucket) -> int:
        return 1

    @override
    def shape(self, leaf: Array) -> tuple[int, ...]:
        return leaf.shape

    @override
    def restore(self, rows: Array, leaf: Array) -> Array:
        return rows.reshape(leaf.shape)

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        return exact.all_reduce(leaves, self.axes, self.divisor, token)

    @property
    @abc.abstractmethod
    def divisor(self) -> int:
        """Number that sums are divided by."""


@dataclasses.dataclass(frozen=True)
class AllReduce(WholeLeaves):
    """Sum or mean, whole on every worker."""

    mean: bool = False

    can_estimate: ClassVar[bool] = True

    @property
    @override
    def divisor(self) -> int:
        return self.axes.num_workers if self.mean else 1

    @override
    def cuts(self, options: Options) -> Cuts:
        return Cuts(options.bucketing)

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        axes, call = self.axes, bucket.call
        part = axes.scatter(flat, call.size)
        reduced = bucket.method.all_reduce(part, call, axes.fold_in(key), state)
        total = reduced.total * np.float32(1 / self.divisor) if self.mean else reduced.total
        # In the dtype that the result has anyway: fewer bytes over the fast axes.
        total = axes.gather(total.astype(bucket.dtype), bucket.size)
        if not axes.fast:
            return dataclasses.replace(reduced, total=total)
        metrics = {name: lax.pmean(m, axes.names[1:]) for name, m in reduced.metrics.items()}
        return dataclasses.replace(reduced, total=total, token=total, metrics=metrics)


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Operation):
    """Sum, of which every worker gets its part of a dimension."""

    dimension: int = 0
    tiled: bool = False

    @override
    def check_method(self, method: Method) -> None:
        checks.check_chunked(method, "dq.psum_scatter")

    @override
    def check(self, name: str, leaf: Array) -> None:
        checks.check_scatters(name, leaf, self.dimension, self.axes.num_workers, self.tiled)

    @override
    def check_shards(self, name: str, leaf: Array, spec: PartitionSpec) -> None:
        checks.check_not_split(name, spec, self._dimension(leaf), "scatter_dimension")

    @override
    def cuts(self, options: Options) -> Cuts:
        return Cuts(options.bucketing, into_parts=False)

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
    def multiple(self, bucket: Bucket) -> int:
        return bucket.method.granule * bucket.call.topology.chunks_per_worker

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
        result = {
            index: exact.reduce_scatter(
                after(token, leaf), self.axes.slow, self._dimension(leaf), self.tiled
            )
            for index, leaf in leaves.items()
        }
        return result, [*result.values()]

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        call = dataclasses.replace(bucket.call.of_size(flat.size), collective="psum_scatter")
        assert isinstance(bucket.method, ChunkedMethod)
        return Reduced(*bucket.method.reduce_scatter(flat, call, key))

    def _dimension(self, leaf: Array) -> int:
        return self.dimension % leaf.ndim


@dataclasses.dataclass(frozen=True)
class AllGather(Operation):
    """Parts of all workers, on every worker."""

    dimension: int = 0
    tiled: bool = False

    last_first: ClassVar[bool] = False
    salt: ClassVar[int | None] = 0x67617468

    @override
    def cuts(self, options: Options) -> Cuts:
        # A forward pass can begin with the first leaves, whatever the topology of the transpose.
        into = "in_order" if options.bucketing == "auto" else options.bucketing
        return Cuts(into, into_parts=False)

    @property
    @override
    def result_rows(self) -> int:
        return self.axes.num_workers

    @override
    def check_method(self, method: Method) -> None:
        checks.check_chunked(method, "dq.all_gather")

    @override
    def check(self, name: str, leaf: Array) -> None:
        checks.check_gathers(name, leaf, self.dimension, self.tiled)

    @override
    def check_values(self, name: str, leaf: Array) -> None:
        return None

    @override
    def check_shards(self, name: str, leaf: Array, spec: PartitionSpec) -> None:
        if self.tiled:
            checks.check_not_split(name, spec, self._dimension(leaf), "axis")

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
