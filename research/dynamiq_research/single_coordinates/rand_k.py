"""Rand-K: coordinates that are drawn at random, the same on all workers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax.methods import BF16, Call, ChunkedMethod, Method, Reduced, State, WireCost
from dynamiq_jax.parts import check_flag, override
from dynamiq_research.single_coordinates.largest import largest
from dynamiq_research.topk_chunked import check_bits, most_within

_PLACES = 0x706C6163  # folded into the key of the places
_KEY_BYTES = 4  # that a worker gathers of all others: all see whether their keys differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandK(Method):
    """K coordinates of a bucket, drawn uniformly in each step, and zeros elsewhere.

    Papers: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599,
    which adds error feedback; with a weight that makes the sum unbiased, Wangni, Wang, Liu, Zhang,
    NeurIPS 2018, arXiv 1710.09854. All workers draw the same places from the shared key, so that no
    indices are sent, and any topology sums the values.

    The expected squared error is 1 - K / size of the squared norm of the sum, besides the error of
    `inner`. With `unbiased=True`, values are multiplied by size / K: the expectation of the sum is
    then exact, and the squared error is size / K - 1 of that norm. Error feedback needs the first:
    the second is above the norm for K below half of the size, and residuals would grow.

    NaN or Inf in any coordinate, drawn or not, make the whole bucket NaN on all workers. That costs
    no bytes: a worker sends NaN in place of its values. So do keys that differ between workers,
    whose places differ: a hash of 4 bytes from each shows it.

    >>> RandK(bits=4.0).unbiased
    False
    """

    inner: ChunkedMethod = dataclasses.field(default_factory=BF16)  # sums the values, as one vector
    bits: float = 2.0  # per coordinate of the bucket: with BF16, K is 1/8 of the size
    unbiased: bool = False  # whether values are multiplied by size / K

    def __post_init__(self):
        if not isinstance(self.inner, ChunkedMethod):
            raise ValueError(
                f"inner={self.inner!r} cannot sum the values: it is not a method of one round "
                "without state. Give one, such as dq.methods.BF16() or dq.methods.Exact()."
            )
        check_bits(self.bits, 0)
        check_flag("unbiased", self.unbiased)

    def num_chosen(self, call: Call) -> int:
        """Return K, the most coordinates that keep the values within `bits`. Static."""
        cost_of = self.inner.wire_cost
        return most_within(self.bits, call, call.size, lambda count: cost_of(call.of_size(count)))

    @override
    def wire_cost(self, call: Call) -> WireCost:
        hashes = WireCost(0, (call.num_workers - 1) * _KEY_BYTES)
        return self.inner.wire_cost(call.of_size(self.num_chosen(call))) + hashes

    @override
    def all_reduce(self, flat: Array, call: Call, key: Array, state: State) -> Reduced:
        count = self.num_chosen(call)
        place_key = jax.random.fold_in(key, _PLACES)
        words = jax.random.bits(place_key, (call.size,), jnp.uint32)
        hashes = call.axis.gather(jax.random.bits(place_key, (1,), jnp.uint32))
        # In increasing order: neighbors in the bucket, whose magnitudes are alike, stay together,
        # as codes with a scale for several values need.
        places = largest(words, count)
        values = flat.at[places].get(unique_indices=True, indices_are_sorted=True)
        # Places that are not drawn are not sent, but must not hide that a worker diverges.
        values = jnp.where(jnp.all(jnp.isfinite(flat)), values, jnp.asarray(np.nan, flat.dtype))
        reduced = self.inner.all_reduce(values, call.of_size(count), key, ())
        weight = np.float32(call.size / count if self.unbiased else 1)

        def put_back(values: Array, others: Array) -> Array:
            # The order of the places is known, which makes a scatter cheap.
            at = jnp.broadcast_to(others, (call.size,)).at[places]
            return at.set(values * weight, unique_indices=True, indices_are_sorted=True)

        zero = jnp.zeros((), jnp.float32)
        is_lost = ~jnp.any(jnp.isfinite(reduced.total)) | jnp.any(hashes != hashes[:1])
        applied = reduced.applied
        return dataclasses.replace(
            reduced,
            total=jnp.where(is_lost, np.float32(np.nan), put_back(reduced.total, zero)),
            applied=None if applied is None else put_back(applied, zero),
        )
