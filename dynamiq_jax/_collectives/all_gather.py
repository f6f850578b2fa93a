"""Parts of all workers, on every worker."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._buckets.order import after
from dynamiq_jax._collectives.collective import Collective, Leaves
from dynamiq_jax._inputs import checks
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax.methods import ChunkedMethod, Method, Reduced, State
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class AllGather(Collective):
    """Parts of all workers, on every worker."""

    dimension: int = 0
    tiled: bool = False

    last_first: bool = dataclasses.field(default=False, kw_only=True)
    salt: ClassVar[int | None] = 0x67617468

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
    def check_method(self, method: Method) -> None:
        checks.check_chunked(method, "dq.all_gather")

    @override
    def check(self, name: str, leaf: Any) -> None:
        checks.check_gathers(name, leaf, self.dimension, self.tiled)

    @override
    def check_values(self, name: str, leaf: Array) -> None:
        return None

    @override
    def check_shards(self, name: str, leaf: Any, spec: PartitionSpec) -> None:
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
    def multiple(self, bucket: Bucket) -> int:
        return bucket.method.granule

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
