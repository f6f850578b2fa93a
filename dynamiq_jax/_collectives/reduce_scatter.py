"""Sum, of which every worker gets its part."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets import exact
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._buckets.order import after
from dynamiq_jax._collectives.collective import Collective, Leaves
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax.methods import ChunkedMethod, Method, Reduced, State
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Collective):
    """Sum, of which every worker gets its part of a dimension."""

    dimension: int = 0
    tiled: bool = False

    @override
    def check_method(self, method: Method) -> None:
        checks.check_chunked(method, "dq.psum_scatter")

    @override
    def check(self, name: str, leaf: Any) -> None:
        checks.check_scatters(name, leaf, self.dimension, self.axes.num_workers, self.tiled)

    @override
    def check_shards(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
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
