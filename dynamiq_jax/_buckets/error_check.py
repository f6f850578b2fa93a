"""Check of the error of every bucket: a limit with a way back to the exact sum, and metrics."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import exact, scopes, sharing
from dynamiq_jax._buckets.axes import Axes
from dynamiq_jax._buckets.error_estimate import (
    Estimate,
    estimate,
    joined,
    sample_bytes,
    without_error,
)
from dynamiq_jax._buckets.operations import AllReduce
from dynamiq_jax._buckets.plan import Bucket, Plan
from dynamiq_jax._inputs.options import MEASURED
from pallas_kernels import compat


class Check(NamedTuple):
    """Outcome of the check of a bucket."""

    estimate: Estimate  # of what was returned
    fell_back: Array  # 1 if the bucket was sent again, exactly, and 0 otherwise: float32


def checked(
    operation: AllReduce, bucket: Bucket, flat: Array, total: Array, key: Array, limit: float | None
) -> tuple[Array, Check]:
    """Estimate the error of a bucket, and send it again if that may be above a limit.

    A result that is not finite is sent again too, since no sample shows whether the exact one is:
    what is not finite there has NaN or Inf at its own coordinates, and nowhere else.

    Args:
      operation: the all-reduce.
      bucket: the bucket.
      flat: values of this worker, [size].
      total: the result, [size].
      key: typed PRNG key of the bucket.
      limit: largest vNMSE, or None.
    """
    with scopes.scope(scopes.ESTIMATE):
        estimated, variance = estimate(operation.axes, bucket, flat, total, key, operation.divisor)
    if limit is None:
        return total, Check(estimated, jnp.zeros_like(estimated.error))
    is_over = estimated.may_exceed(limit, variance) | (estimated.bad_rows > 0)

    @scopes.scope(scopes.FALLBACK)
    def exactly() -> tuple[Array, Estimate]:
        results, _ = exact.all_reduce({0: flat}, operation.axes, operation.divisor)
        again = results[0].astype(total.dtype)
        return compat.match_varying(again, total), compat.match_varying(
            without_error(bucket, again), estimated.error
        )

    result, kept = lax.cond(is_over, exactly, lambda: (total, estimated))
    return result, Check(kept, is_over.astype(jnp.float32))


def summary(plan: Plan, axes: Axes, checks: Iterable[Check], exact_leaves: list[Any]) -> Any:
    """Return the metrics of an all-reduce, float32 scalars.

    Args:
      plan: buckets.
      axes: axes of the collective.
      checks: of every bucket of the plan, in order.
      exact_leaves: those that are summed exactly.
    """
    sent = np.float32(exact.bytes_sent(axes, exact_leaves))
    if not plan.buckets:
        nothing = {"bytes": jnp.float32(sent), "sharing_gain": jnp.float32(1)}
        return dict.fromkeys(MEASURED, jnp.float32(0)) | nothing
    estimates, fell_back = zip(*checks, strict=True)
    whole, bytes_sent = joined(estimates), jnp.float32(sent)
    for bucket, again in zip(plan.buckets, fell_back, strict=True):
        whole_again = exact.bytes_sent(axes, [_Flat((bucket.size,), bucket.dtype)])
        sent = np.float32(bucket.bytes_sent + sample_bytes(bucket, axes))
        bytes_sent = bytes_sent + sent + again * np.float32(whole_again)
    errors = jnp.stack([each.vnmse for each in estimates])
    gain, idle = sharing.gain_of_sharing(plan.buckets, estimates)
    return {
        "error": whole.vnmse,
        "worst_error": jnp.max(errors),
        "worst_bucket": jnp.argmax(errors).astype(jnp.float32),
        "sharing_gain": gain,
        "idle_bucket": idle,
        "norm": whole.scale * jnp.sqrt(whole.square),
        "non_finite": whole.bad_rows / whole.rows,
        "bytes": bytes_sent,
        "fallbacks": sum(fell_back, jnp.float32(0)),
    }


class _Flat(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any
