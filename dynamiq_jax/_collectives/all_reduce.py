"""Sum or mean, whole on every worker."""

import dataclasses

import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import exact
from dynamiq_jax._buckets.buckets import Bucket, CutRules
from dynamiq_jax._collectives.collective import Collective, Leaves
from dynamiq_jax._inputs.compression import Compression
from dynamiq_jax.methods import Reduced, State
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class AllReduce(Collective):
    """Sum or mean, whole on every worker."""

    mean: bool = False

    @property
    def divisor(self) -> int:
        """Number that sums are divided by."""
        return self.axes.num_workers if self.mean else 1

    @override
    def rules(self, compression: Compression) -> CutRules:
        return CutRules(compression.bucketing)

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        return exact.all_reduce(leaves, self.axes, self.divisor, token)

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
