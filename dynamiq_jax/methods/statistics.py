"""Statistics of rows, combined over the workers: small, and the same bits everywhere."""

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax import compat
from dynamiq_jax.codec import scales
from dynamiq_jax.codec.norms import l2_norm


def combine_statistics(local: Array, axis_name: str, num_workers: int) -> Array:
    """Combines float32 [1 or 2, num_rows]: norms as sqrt(sum of squares), then means as their mean.

    Travels as bfloat16 bits in uint16 (XLA:CPU would widen bfloat16). Reduced by owners and
    gathered, so that all workers hold the same bits whatever the order of a backend's sums. The
    rows have to divide by the workers.
    """
    words = scales.bfloat16_bits(local).reshape(local.shape[0], num_workers, -1)
    received = lax.all_to_all(words, axis_name, split_axis=1, concat_axis=1)
    values = scales.bfloat16_value(received.astype(jnp.uint32))
    combined = [l2_norm(values[0], axis=0)]
    if local.shape[0] == 2:
        combined.append(jnp.mean(values[1], axis=0))
    gathered = compat.all_gather(scales.bfloat16_bits(jnp.stack(combined)), axis_name)
    return scales.bfloat16_value(
        jnp.swapaxes(gathered, 0, 1).reshape(local.shape).astype(jnp.uint32)
    )


def combined_bytes(num_rows: int, num_workers: int, kinds: int = 1) -> int:
    """Bytes that a worker sends for `kinds` statistics of each row: two bytes a row, reduced and
    gathered, twice (n - 1)/n of them.
    """
    return 2 * (num_workers - 1) * 2 * (num_rows // num_workers * kinds)
