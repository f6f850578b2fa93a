"""Loop of all collectives over the buckets of a plan, on the leaves of one device."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import scopes
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._buckets.leaves import join
from dynamiq_jax._buckets.order import after, token_of
from dynamiq_jax._collectives.collective import Leaves
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._run.cuts import Carried, Cut, cut, joined
from dynamiq_jax._run.no_gradient import refuse_gradient
from dynamiq_jax._run.sample import fold_in_sample
from dynamiq_jax._states.states import States
from dynamiq_jax.methods import State


class Sent(NamedTuple):
    """Result of the collective of one bucket, as a pytree: `Reduced` without `applied`."""

    total: Array
    token: Array
    state: State
    metrics: Mapping[str, Array]
    measured: Any


def send_all(
    plan: Plan,
    leaves: Leaves,
    key: Array,
    states: States,
    token: Array | None,
    sampled_over: Sequence[str] | None = None,
) -> tuple[Leaves, States, Mapping[str, Array], Array | None]:
    """Run a collective on the leaves of one device, one bucket after the other.

    Args:
      plan: the plan.
      leaves: leaves of this device by index; untouched ones may be missing.
      key: typed PRNG key, the same on all workers.
      states: states of the method for every bucket.
      token: token that the first transfer waits for; see `order.after`.
      sampled_over: axes of the devices whose samples are folded into the keys of their buckets;
        None: there are none.

    Returns:
      Results by index; states for the next step; metrics of the method, which are means over
      buckets weighted by coordinates; and a token that is available after all transfers.
    """
    collective = plan.collective
    sent: dict[int, Sent] = {}
    pieces: dict[int, Leaves] = {}
    sender = Sender(plan, key, sampled_over)
    for numbers, of_group, group, carried in sender.groups(leaves, states, token):
        rows = group.pieces(carried, [one.total for one in of_group])
        sent |= dict(zip(numbers, of_group, strict=True))
        pieces |= dict(zip(numbers, rows, strict=True))
        token = of_group[-1].token
    order = sorted(sent, reverse=collective.last_first)
    metrics = _means([(plan.buckets[number].size, sent[number].metrics) for number in order])
    in_order = [sent[number] for number in range(len(plan.buckets))]
    exactly = {index: leaves[index] for index, _ in plan.exact}
    metrics |= collective.summary(
        plan.buckets, [one.measured for one in in_order], [*exactly.values()]
    )
    with scopes.scope(scopes.EXACT):
        # Exact leaves come last: a backward pass has all of them only at its end.
        result, arrived = collective.exact(exactly, token)
    result |= joined(collective, [pieces[number] for number in range(len(pieces))], leaves)
    return result, tuple(one.state for one in in_order), metrics, token_of(arrived or [token])


def _means(metrics: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
    """Average metrics of buckets, (coordinates, metrics), over those buckets that have them."""
    sums: dict[str, Array] = {}
    sizes = collections.Counter[str]()
    for size, of_bucket in metrics:
        for name, value in of_bucket.items():
            sums[name] = sums.get(name, jnp.float32(0)) + value * np.float32(size)
            sizes[name] += size
    return {name: total / np.float32(sizes[name]) for name, total in sums.items()}


@dataclasses.dataclass(frozen=True)
class Sender:
    """Transfer of the groups of a plan."""

    plan: Plan
    key: Array  # typed PRNG key, the same on all workers
    sampled_over: Sequence[str] | None = None  # see `send_all`

    def groups(
        self, leaves: Leaves, states: States, token: Array | None
    ) -> Iterator[tuple[tuple[int, ...], list[Sent], Cut, Carried]]:
        """Send all groups, one after the other.

        Args:
          leaves: leaves of this device by index.
          states: states of the method for every bucket of the plan.
          token: token that the first transfer waits for.

        Yields:
          Numbers of the buckets of a group, their results, their leaves, and the carried arrays.
        """
        for numbers in self.plan.groups:
            buckets = [self.plan.buckets[number] for number in numbers]
            group = cut(self.plan.collective, buckets, leaves)
            key = self._key_of_group(buckets, leaves, token)
            sent, carried = self.send(numbers, group, states, token, key)
            yield numbers, sent, group, carried
            token = sent[-1].token

    def _key_of_group(
        self, buckets: Sequence[Bucket], leaves: Leaves, token: Array | None
    ) -> Array:
        """Return the key of a group, which waits for no other leaves than its own."""
        if self.sampled_over is None:
            return self.key
        own = sorted({index for bucket in buckets for index in bucket.leaves})
        return fold_in_sample(self.key, [leaves[i] for i in own], self.sampled_over, token)

    def send(
        self,
        numbers: tuple[int, ...],
        group: Cut,
        states: States,
        token: Array | None,
        key: Array,
    ) -> tuple[list[Sent], Carried]:
        """Send the buckets of a group, in a loop if there are several.

        Args:
          numbers: numbers of the buckets.
          group: their leaves.
          states: states of the method for every bucket of the plan.
          token: token that the first transfer waits for.
          key: typed PRNG key of the group.

        Returns:
          Results of the buckets, and the arrays that the loop carried.
        """
        first = self.plan.buckets[numbers[0]]
        multiple = self.plan.collective.multiple(first)

        def turn(carried: Carried, each: Any) -> tuple[Carried, Sent]:
            place, number, state = each
            flat = refuse_gradient(join(group.take(carried, place), multiple))
            sent = self._send_one(first, after(token, flat), key_of(key, first, number), state)
            carried, total = group.put(carried, place, sent.total)
            return carried, sent._replace(total=total)

        if len(numbers) == 1:
            carried, sent = turn(group.start, (0, numbers[0], states[numbers[0]]))
            return [sent], carried
        return _looped(turn, numbers, group.start, states)

    def _send_one(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
        # Without jit, the loops of a codec would take minutes.
        with jax.disable_jit(False):
            sent = self._program(bucket.program, flat, key, state)
        names = self.plan.request.metrics([bucket.method])
        return sent._replace(metrics={n: sent.metrics[n] for n in names if n in sent.metrics})

    @functools.cached_property
    def _program(self) -> Callable[[Bucket, Array, Array, State], Sent]:
        """`transfer`, which is traced once for all buckets of one program."""

        def transfer(bucket: Bucket, flat: Array, key: Array, state: State) -> Sent:
            reduced = self.plan.collective.transfer(bucket, flat, key, state)
            return Sent(*(getattr(reduced, field) for field in Sent._fields))

        return jax.jit(transfer, static_argnums=0)


def key_of(key: Array, bucket: Bucket, number: Any) -> Array:
    """Return the key of a bucket.

    Args:
      key: typed PRNG key of its group.
      bucket: the bucket.
      number: its number in the plan.
    """
    key = jax.random.fold_in(key, number)
    if bucket.split_over:  # different shards get different noise, on any mesh
        key = jax.random.fold_in(key, lax.axis_index(bucket.split_over))
    return key


def _looped(
    turn: Callable[[Carried, Any], tuple[Carried, Sent]],
    numbers: tuple[int, ...],
    start: Carried,
    states: States,
) -> tuple[list[Sent], Carried]:
    """Run the turns of a loop over buckets; return their results, and the carried arrays."""
    places = np.arange(len(numbers), dtype=np.int32)
    stacked_states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(states[n] for n in numbers))
    carried, stacked = lax.scan(turn, start, (places, np.array(numbers, np.int32), stacked_states))
    sent = [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in range(len(numbers))]
    return sent, carried
