"""Norms of rows or blocks over all workers: small, and bit-identical everywhere."""

from jax import Array

from dynamiq_jax._core import Axis
from pallas_kernels.codec import l2_norm
from pallas_kernels.codec.scales import bfloat16_bits, bfloat16_value

_BYTES = 2  # of a norm: sent as bits of bfloat16, which XLA:CPU would widen


def combine_norms(local: Array, axis: Axis) -> Array:
    """Combine norms of all workers, float32 [count], as sqrt(sum of squares): bits of bfloat16.

    The workers divide `count`. The result is uint16 [count], the same on all workers.
    """

    def combine(words: Array) -> Array:
        return bfloat16_bits(l2_norm(bfloat16_value(words), axis=0))

    shares = bfloat16_bits(local).reshape(axis.size, -1)
    return axis.reduce_by_owners(shares, combine).reshape(-1)


def combined_bytes(count: int, axis: Axis) -> int:
    """Return the bytes that each worker sends in `combine_norms`."""
    share = _BYTES * (count // axis.size)
    return axis.owners_bytes(share, share)


def gather_norms(local: Array, axis: Axis) -> Array:
    """Gather the norms of all workers, float32 [count] each, as bits: uint16 [workers * count]."""
    return axis.gather(bfloat16_bits(local)).reshape(-1)


def gathered_bytes(count: int, axis: Axis) -> int:
    """Return the bytes that each worker sends in `gather_norms`, of `count` norms in all."""
    return (axis.size - 1) * _BYTES * (count // axis.size)
