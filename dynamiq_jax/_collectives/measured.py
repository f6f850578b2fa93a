"""An all-reduce whose error is estimated: a limit with a way back to the exact sum, and metrics."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import exact, scopes
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._buckets.order import token_of
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._collectives.collective import Collective
from dynamiq_jax._collectives.error_estimate import (
    Estimate,
    estimate,
    joined,
    sample_bytes,
    sent_again,
)
from dynamiq_jax._inputs.request import MEASURED, Request
from dynamiq_jax.methods import Reduced, State
from pallas_kernels._jax import compat
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True)
class Measured(AllReduce):
    """All-reduce of which each bucket has an estimate of its error."""

    limit: float | None = None  # largest vNMSE of a bucket

    @override
    def transfer(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        """Run the all-reduce, and run it again exactly if its error may be above the limit.

        A result that is not finite is sent again too. No sample shows which coordinates of the
        exact result are finite, and the exact sum has NaN and Inf in their own coordinates alone.
        """
        reduced = super().transfer(bucket, flat, key, state)
        with scopes.scope(scopes.ESTIMATE):
            estimated, variance = estimate(
                self.axes, bucket, flat, reduced.total, key, self.divisor
            )
        total, kept = reduced.total, estimated
        if self.limit is not None:
            total, kept = lax.cond(
                estimated.may_exceed(self.limit, variance) | (estimated.bad_rows > 0),
                lambda: self._exactly(bucket, flat, reduced.total, estimated),
                lambda: (reduced.total, estimated),
            )
        token = token_of([total, kept.error])
        assert token is not None
        return dataclasses.replace(reduced, total=total, token=token, measured=kept)

    @scopes.scope(scopes.FALLBACK)
    def _exactly(
        self, bucket: Bucket, flat: Array, total: Array, estimated: Estimate
    ) -> tuple[Array, Estimate]:
        results, _ = exact.all_reduce({0: flat}, self.axes, self.divisor)
        again = results[0].astype(total.dtype)
        return compat.match_varying(again, total), compat.match_varying(
            sent_again(bucket, again), estimated.error
        )

    @override
    def summary(
        self, buckets: Sequence[Bucket], measured: Sequence[Any], exact_leaves: Sequence[Any]
    ) -> dict[str, Array]:
        sent = np.float32(
            exact.bytes_sent(self.axes, exact_leaves)
            + exact.bytes_of_owners(self.axes, [bucket.method for bucket in buckets])
        )
        if not buckets:
            return dict.fromkeys(MEASURED, jnp.float32(0)) | {"bytes": jnp.float32(sent)}
        whole, bytes_sent = joined(measured), jnp.float32(sent)
        for bucket, one in zip(buckets, measured, strict=True):
            flat = jax.ShapeDtypeStruct((bucket.size,), bucket.dtype)
            once = np.float32(bucket.bytes_sent + sample_bytes(bucket, self.axes))
            whole_again = np.float32(exact.bytes_sent(self.axes, [flat]))
            bytes_sent = bytes_sent + once + one.fell_back * whole_again
        errors = jnp.stack([each.vnmse for each in measured])
        return {
            "error": whole.vnmse,
            "row_error": whole.relative / whole.rows,
            "worst_error": jnp.max(errors),
            "worst_bucket": jnp.argmax(errors).astype(jnp.float32),
            "norm": whole.scale * jnp.sqrt(whole.square),
            "non_finite": whole.bad_rows / whole.rows,
            "bytes": bytes_sent,
            "fallbacks": whole.fell_back,
        }


def measured(collective: Collective, request: Request) -> Collective:
    """Add an estimate of errors to an all-reduce where the request needs one."""
    if not request.estimates or type(collective) is not AllReduce:
        return collective
    of_all_reduce = {
        each.name: getattr(collective, each.name) for each in dataclasses.fields(AllReduce)
    }
    return Measured(**of_all_reduce, limit=request.compression.max_error)
