"""Kinds of collectives: what each does with leaves and buckets, inside one common driver."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import checks, exact
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.leaves import flatten, unflatten
from dynamiq_jax._buckets.plan import Bucket
from dynamiq_jax._methods.base import Method, State
from pallas_kernels.compat import override

Leaves = dict[int, Any]  # index in the flattened tree to leaf


@dataclasses.dataclass(frozen=True)
class Sent:
    """Result of one bucket."""

    values: Array  # what `unflatten` takes
    token: Array  # [1 or more], available once the bucket has travelled
    state: State = ()
    metrics: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """A kind of collective, over the workers of some axes."""

    axes: Axes

    # The last leaves first: in a backward pass their gradients are there first.
    last_first: ClassVar[bool] = True
    # Folded into the key, so that different kinds with the same key have different noise.
    salt: ClassVar[int | None] = None

    def check(self, name: str, leaf: Array) -> None:
        """Raise ValueError for a leaf that is summed already."""
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            checks.check_not_reduced(name, leaf, self.axes.names)

    def planned(self, leaf: Array) -> Any:
        """Return the leaf as the plan counts it: anything with `shape` and `dtype`."""
        return leaf

    @abc.abstractmethod
    def empty(self, leaf: Array) -> Any:
        """Return the result of a leaf of dtype float0, which holds nothing."""

    @abc.abstractmethod
    def exact(self, leaves: Leaves) -> Leaves:
        """Run the exact collective."""

    @abc.abstractmethod
    def flatten(self, bucket: Bucket, leaves: Sequence[Array], granule: int) -> Array:
        """Join the leaves of a bucket."""

    @abc.abstractmethod
    def send(self, method: Method, bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
        """Run the compressed collective of a bucket."""

    @abc.abstractmethod
    def unflatten(self, bucket: Bucket, values: Array, leaves: Sequence[Array]) -> Leaves:
        """Cut the result of a bucket into leaves."""


@dataclasses.dataclass(frozen=True)
class AllReduce(Operation):
    """Sum or mean, whole on every worker."""

    mean: bool = False

    @property
    def _divisor(self) -> int:
        return self.axes.num_workers if self.mean else 1

    @override
    def empty(self, leaf: Array) -> Any:
        return leaf

    @override
    def exact(self, leaves: Leaves) -> Leaves:
        return exact.all_reduce(leaves, self.axes, self._divisor)

    @override
    def flatten(self, bucket: Bucket, leaves: Sequence[Array], granule: int) -> Array:
        return flatten(bucket.leaves, leaves)

    @override
    def send(self, method: Method, bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
        axes = self.axes
        part = axes.scatter(flat, bucket.call.size)
        reduced = method.all_reduce(part, bucket.call, axes.fold_in(key), state)
        total = reduced.total * np.float32(1 / self._divisor) if self.mean else reduced.total
        # In the dtype that the result has anyway: fewer bytes over the fast axes.
        total = axes.gather(total.astype(bucket.dtype), bucket.size)
        metrics, token = reduced.metrics, reduced.token
        if axes.fast:
            names = tuple(axis.name for axis in axes.fast)
            metrics = {name: lax.pmean(value, names) for name, value in metrics.items()}
            token = total
        return Sent(total, token, reduced.state, metrics)

    @override
    def unflatten(self, bucket: Bucket, values: Array, leaves: Sequence[Array]) -> Leaves:
        return unflatten(bucket.leaves, values, leaves)


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Operation):
    """Sum, of which every worker gets its part of a dimension."""

    dimension: int = 0
    tiled: bool = False

    @override
    def check(self, name: str, leaf: Array) -> None:
        super().check(name, leaf)
        checks.check_scatters(name, leaf, self.dimension, self.axes.num_workers, self.tiled)

    @override
    def empty(self, leaf: Array) -> Any:
        shape, dimension = list(leaf.shape), self.dimension
        part = [shape[dimension] // self.axes.num_workers] if self.tiled else []
        return np.zeros([*shape[:dimension], *part, *shape[dimension + 1 :]], leaf.dtype)

    @override
    def exact(self, leaves: Leaves) -> Leaves:
        axis = self.axes.slow.name
        return {
            index: exact.reduce_scatter(leaf, axis, self.dimension, tiled=self.tiled)
            for index, leaf in leaves.items()
        }

    @override
    def flatten(self, bucket: Bucket, leaves: Sequence[Array], granule: int) -> Array:
        workers = self.axes.num_workers
        parts = [self._parts(leaves[index]).reshape(workers, -1) for index in bucket.leaves]
        flat = jnp.concatenate(parts, axis=1)
        multiple = granule * bucket.call.topology.chunks_per_worker
        return jnp.pad(flat, ((0, 0), (0, -flat.shape[1] % multiple))).reshape(-1)

    @override
    def send(self, method: Method, bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
        call = dataclasses.replace(bucket.call.of_size(flat.size), collective="psum_scatter")
        scattered = method.reduce_scatter(flat, call, key)
        return Sent(scattered.values, scattered.token)

    @override
    def unflatten(self, bucket: Bucket, values: Array, leaves: Sequence[Array]) -> Leaves:
        like = {
            index: jax.ShapeDtypeStruct(self._parts(leaves[index]).shape[1:], leaves[index].dtype)
            for index in bucket.leaves
        }
        size = bucket.size // self.axes.num_workers
        pieces = unflatten(bucket.leaves, values[:size], like)
        return {index: self._as_result(piece) for index, piece in pieces.items()}

    def _parts(self, leaf: Array) -> Array:
        """Return a leaf as [workers, part of the scattered dimension, other dimensions]."""
        moved = jnp.moveaxis(leaf, self.dimension, 0)
        return moved.reshape(self.axes.num_workers, -1, *moved.shape[1:])

    def _as_result(self, piece: Array) -> Array:
        moved = jnp.moveaxis(piece, 0, self.dimension)
        return moved if self.tiled else jnp.squeeze(moved, self.dimension)


@dataclasses.dataclass(frozen=True)
class AllGather(Operation):
    """Parts of all workers, on every worker."""

    dimension: int = 0
    tiled: bool = False

    last_first: ClassVar[bool] = False
    salt: ClassVar[int | None] = 0x67617468

    @override
    def check(self, name: str, leaf: Array) -> None:
        checks.check_gathers(name, leaf, self.dimension, self.tiled)

    @override
    def planned(self, leaf: Array) -> Any:
        return jax.ShapeDtypeStruct((self.axes.num_workers, *leaf.shape), leaf.dtype)

    @override
    def empty(self, leaf: Array) -> Any:
        return np.zeros(self._shape(leaf), leaf.dtype)

    @override
    def exact(self, leaves: Leaves) -> Leaves:
        gather = self.axes.slow.gather
        return {index: self._as_result(gather(leaf), leaf) for index, leaf in leaves.items()}

    @override
    def flatten(self, bucket: Bucket, leaves: Sequence[Array], granule: int) -> Array:
        flat = flatten(bucket.leaves, leaves)
        return jnp.pad(flat, (0, -flat.size % granule))

    @override
    def send(self, method: Method, bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
        whole = bucket.call.of_size(self.axes.num_workers * flat.size)
        call = dataclasses.replace(whole, collective="all_gather")
        gathered = method.all_gather(flat, call, key)
        return Sent(gathered.decode(), gathered.token)

    @override
    def unflatten(self, bucket: Bucket, values: Array, leaves: Sequence[Array]) -> Leaves:
        workers = self.axes.num_workers
        parts = values.reshape(workers, -1)[:, : bucket.size // workers]
        pieces = jax.vmap(lambda part: unflatten(bucket.leaves, part, leaves))(parts)
        return {index: self._as_result(piece, leaves[index]) for index, piece in pieces.items()}

    def _dimension(self, leaf: Array) -> int:
        return int(self.dimension) % (leaf.ndim if self.tiled else leaf.ndim + 1)

    def _shape(self, leaf: Array) -> tuple[int, ...]:
        shape, dimension = list(leaf.shape), self._dimension(leaf)
        if self.tiled:
            shape[dimension] *= self.axes.num_workers
        else:
            shape.insert(dimension, self.axes.num_workers)
        return tuple(shape)

    def _as_result(self, gathered: Array, leaf: Array) -> Array:
        return jnp.moveaxis(gathered, 0, self._dimension(leaf)).reshape(self._shape(leaf))
