"""Norms that a worker carries from the first half of a mean to the second.

An all-reduce of DynamiQ rounds a sum in the order of the earlier messages, and so with their noise.
Then rounding errors cancel. The second half gets this order from the norms that ordered the rows in
the first half.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from dynamiq_jax.methods import Call, ChunkCodec, DynamiQ, Method
from pallas_kernels.codec.scales import bfloat16_value


def num_carried(method: Method, call: Call) -> int:
    """Count the norms that a worker carries: one for each row of its shard, or none.

    Args:
      method: the method of a bucket.
      call: the reduce-scatter.
    """
    # Noise depends on the place of a row. Only if both halves order rows by the same norms can
    # their errors cancel. An all-to-all of many workers gains more by an order of its own.
    if not isinstance(method, DynamiQ) or method.rounding != "correlated":
        return 0
    num_workers, topology = call.num_workers, call.topology
    is_direct = len(topology.compressions(num_workers)) <= 2
    has_other_order = is_direct and method.reorders_sums(num_workers)
    if has_other_order:
        return 0
    return method.layout(call.size, call.num_chunks).rows_per_chunk


def carried(method: Method, codec: Any, call: Call) -> Array:
    """Return the norms of the rows of this worker's shard, which all workers combined.

    Args:
      method: the method of a bucket.
      codec: codec of the reduce-scatter.
      call: the reduce-scatter.

    Returns:
      float32 [num_carried].
    """
    if not (count := num_carried(method, call)):
        return jnp.zeros((0,), jnp.float32)
    own = lax.dynamic_slice_in_dim(codec.row_norms, call.axis.index * count, count)
    return bfloat16_value(own)


def bind(method: Method, part: Array, norms: Array, call: Call, key: Array) -> ChunkCodec:
    """Return the codec of the second half, after exchanging the norms that workers carried.

    Args:
      method: the method of a bucket, which carries norms.
      part: the mean that this worker owns, float [size / workers].
      norms: result of `carried` in the first half.
      call: the all-gather.
      key: key of the first half.
    """
    assert isinstance(method, DynamiQ)
    return method.bind(part, call, key, local_norms=norms)
