"""Loop of all collectives over the buckets of a plan, on the leaves of one device."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import scopes
from dynamiq_jax._buckets.error_check import Check, checked, summary
from dynamiq_jax._buckets.leaves import join, split_rows
from dynamiq_jax._buckets.no_gradient import refuse_gradient
from dynamiq_jax._buckets.operations import AllReduce, Leaves, Operation
from dynamiq_jax._buckets.order import after, token_of
from dynamiq_jax._buckets.plan import Bucket, Plan
from dynamiq_jax._buckets.stripes import Stripes
from dynamiq_jax._core.naming import spelled
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax.methods import Reduced, State
from pallas_kernels import compat

States = tuple[State, ...]  # of a method, for every bucket


@dataclasses.dataclass(frozen=True)
class Sent(Reduced):
    """Result of the collective of one bucket."""

    check: Check | None = None  # if errors are estimated
    # Of the first stripe, in place of the totals of all: result rows of its leaves, by index.
    striped: Leaves = dataclasses.field(default_factory=dict)


def send_all(
    sender: "Sender", states: States, token: Array | None
) -> tuple[Leaves, States, Mapping[str, Array], Array | None]:
    """Run a collective on the leaves of one device, one bucket after the other.

    Args:
      sender: the collective.
      states: states of the method for every bucket.
      token: token that the first transfer waits for; see `order.after`.

    Returns:
      Results by index, states for the next step, metrics of the method, which are means over
      buckets weighted by coordinates, and a token that is available once all has arrived.
    """
    operation, plan, leaves = sender.operation, sender.plan, sender.leaves
    sent = send_buckets(sender, states, token)
    if sent:
        token = [*sent.values()][-1].token
    metrics = _means([(plan.buckets[number].size, sent[number].metrics) for number in sent])
    if sender.compression.measures:
        checks = [check for n in range(len(sent)) if (check := sent[n].check) is not None]
        exactly = [leaves[index] for index, _ in plan.exact]
        metrics |= summary(plan, operation.axes, checks, exactly)
    with scopes.scope(scopes.EXACT):
        # The last ones: a backward pass has all exact leaves only at its end.
        result, arrived = operation.exact({index: leaves[index] for index, _ in plan.exact}, token)
    result |= restored(operation, plan, leaves, [sent[n].total for n in range(len(sent))])
    for one in sent.values():
        result |= {
            index: _result(operation, rows, leaves[index]) for index, rows in one.striped.items()
        }
    return (
        result,
        tuple(sent[number].state for number in range(len(sent))),
        metrics,
        token_of(arrived or [token]),
    )


def _means(metrics: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
    """Average metrics of buckets, (coordinates, metrics), over those buckets that have them."""
    sums: dict[str, Array] = {}
    sizes = collections.Counter[str]()
    for size, of_bucket in metrics:
        for name, value in of_bucket.items():
            sums[name] = sums.get(name, jnp.float32(0)) + value * np.float32(size)
            sizes[name] += size
    return {name: total / np.float32(sizes[name]) for name, total in sums.items()}


def send_buckets(sender: "Sender", states: States, token: Array | None) -> dict[int, Sent]:
    """Send the buckets of a plan, one after the other; see `send_all`.

    Returns:
      Results by the number of a bucket, in the order in which they are sent.
    """
    sent: dict[int, Sent] = {}
    unrolled = sender.compression.options.unrolled_buckets
    for numbers in groups_in_order(sender.plan, sender.operation.last_first, unrolled):
        group = sender.send(numbers, states, token)
        sent |= dict(zip(numbers, group, strict=True))
        token = group[-1].token
    return sent


def groups_in_order(plan: Plan, last_first: bool, unrolled: int) -> list[tuple[int, ...]]:
    """Return the numbers of buckets in the order in which they are sent.

    Stripes of the same leaves come together: they share one compiled codec. Of the others, the
    first `unrolled` ones are alone. Neighbors behind them that are alike come together too.
    """
    numbers = range(len(plan.buckets))
    order = list(reversed(numbers) if last_first else numbers)
    apart = set([n for n in order if plan.buckets[n].stripe is None][:unrolled])

    def together(number: int) -> Hashable:
        bucket = plan.buckets[number]
        of_leaves = () if bucket.stripe is None else bucket.leaves
        return number if number in apart else (bucket.program, of_leaves)

    return [tuple(group) for _, group in itertools.groupby(order, key=together)]


@dataclasses.dataclass(frozen=True)
class Sender:
    """One collective on the leaves of one device."""

    operation: Operation  # kind of collective, and its axes
    plan: Plan  # buckets and exact leaves
    leaves: Leaves  # by their index in the flattened tree; untouched ones may be missing
    key: Array  # typed PRNG key, the same on all workers
    compression: Compression

    def send(self, numbers: tuple[int, ...], states: States, token: Array | None) -> list[Sent]:
        """Send buckets that are alike, in a loop if there are several."""
        first = self.plan.buckets[numbers[0]]
        if first.stripe is not None:
            return self._send_stripes(numbers, states, token)
        if len(numbers) == 1:
            flat = after(token, self._flat(first))
            return [self._send_one(first, flat, numbers[0], states[numbers[0]])]

        def body(_: None, each: Any) -> tuple[None, Any]:
            place, number, state = each
            flat = after(token, self._select(numbers, place))
            sent = self._send_one(first, flat, number, state)
            return None, (sent.total, sent.token, sent.state, sent.metrics, sent.check)

        _, stacked = lax.scan(body, None, _counted(numbers, states))
        return [
            Sent(total=total, token=token, state=state, metrics=metrics, check=check)
            for total, token, state, metrics, check in _unstacked(stacked, len(numbers))
        ]

    def _send_stripes(
        self, numbers: tuple[int, ...], states: States, token: Array | None
    ) -> list[Sent]:
        """Send the stripes of some leaves, from the first to the last, in a loop.

        Results replace the values of this worker where they have the same shape, so that no memory
        is needed for both.
        """
        operation, first = self.operation, self.plan.buckets[numbers[0]]
        rows = [operation.rows(self.leaves[index]) for index in first.leaves]
        stripes = Stripes(tuple(leaf.shape[1] for leaf in rows), len(numbers))
        dealt = stripes.deal(rows)
        in_place = operation.result_rows == len(rows[0])
        start = dealt if in_place else stripes.zeros(operation.result_rows, dealt)
        same: set[str] = set()  # axes over which values vary, but results do not

        def body(results: tuple[Array, ...], each: Any) -> tuple[tuple[Array, ...], Any]:
            place, number, state = each
            stripe = stripes.take(results if in_place else dealt, place)
            flat = after(token, self._join(first, [stripe]))
            sent = self._send_one(first, flat, number, state)
            same.update(compat.varying_axes(results[0]) - compat.varying_axes(sent.total))
            total = compat.match_varying(sent.total.astype(first.dtype), results[0])
            (total,) = split_rows(total, [stripes.size], operation.result_rows)
            rest = sent.token, sent.state, sent.metrics, sent.check
            return stripes.put(results, place, total), rest

        ascending = tuple(sorted(numbers))
        results, stacked = lax.scan(body, start, _counted(ascending, states))
        for axis in same:
            results = compat.same_over(results, axis)
        of_leaves = dict(zip(first.leaves, stripes.join(results), strict=True))
        by_number = {
            number: Sent(jnp.zeros((0,)), token, state, metrics=metrics, check=check)
            for number, (token, state, metrics, check) in zip(
                ascending, _unstacked(stacked, len(numbers)), strict=True
            )
        }
        by_number[ascending[0]] = dataclasses.replace(by_number[ascending[0]], striped=of_leaves)
        return [by_number[number] for number in numbers]

    def key_of(self, bucket: Bucket, number: Any) -> Array:
        """Return the key of a bucket."""
        key = jax.random.fold_in(self.key, number)
        if bucket.split_over:  # errors of different shards differ, whatever axes number them
            key = jax.random.fold_in(key, lax.axis_index(bucket.split_over))
        return key

    def _send_one(self, bucket: Bucket, flat: Array, number: Any, state: State) -> Sent:
        key = self.key_of(bucket, number)
        # Operation by operation, the loops of a codec would take minutes.
        with jax.disable_jit(False):
            sent = self._send_program(bucket.program, flat, key, state)
        total, token, after_step, all_metrics, check = sent
        names = self.compression.metrics([bucket.method])
        metrics = {name: all_metrics[name] for name in names if name in all_metrics}
        return Sent(total, token, after_step, metrics=metrics, check=check)

    @functools.cached_property
    def _send_program(self) -> Callable[[Bucket, Array, Array, State], Any]:
        """`_send_flat`, which is traced once for all buckets of one program."""
        return jax.jit(self._send_flat, static_argnums=0)

    def _send_flat(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Any:
        operation = self.operation
        with scopes.scope(spelled(bucket.method)):
            reduced = operation.send(bucket, flat, key, state)
        total, check = reduced.total, None
        token: Array | None = reduced.token
        if self.compression.estimates:
            assert isinstance(operation, AllReduce)
            limit = self.compression.options.max_error
            total, check = checked(operation, bucket, flat, total, key, limit)
            token = token_of([total, check.estimate.error])
        return total, token, reduced.state, reduced.metrics, check

    def _flat(self, bucket: Bucket) -> Array:
        members = [self.leaves[index] for index in bucket.leaves]
        if bucket.part is not None:
            members = [members[0][slice(*bucket.part)]]
        return self._join(bucket, members)

    def _select(self, numbers: tuple[int, ...], place: Array) -> Array:
        """Return the flat vector of the bucket at one place of several."""
        buckets = [self.plan.buckets[number] for number in numbers]
        parts = [bucket.part for bucket in buckets if bucket.part is not None]
        leaf = self.leaves[buckets[0].leaves[0]]
        if (
            len(parts) == len(buckets)
            and len({bucket.leaves for bucket in buckets}) == 1
            and leaf.shape[0] <= np.iinfo(np.int32).max
        ):
            starts = jnp.asarray([start for start, _ in parts], jnp.int32)
            part = lax.dynamic_slice_in_dim(leaf, starts[place], parts[0][1] - parts[0][0])
            return self._join(buckets[0], [part])
        branches = [functools.partial(self._flat, bucket) for bucket in buckets]
        return lax.switch(place, branches)

    def _join(self, bucket: Bucket, members: Sequence[Array]) -> Array:
        multiple = self.operation.multiple(bucket)
        return refuse_gradient(join([self.operation.rows(leaf) for leaf in members], multiple))


def restored(operation: Operation, plan: Plan, leaves: Leaves, totals: Sequence[Array]) -> Leaves:
    """Cut the results of buckets into those of leaves, and join the parts of each leaf.

    Stripes have none: their results are those of leaves already.
    """
    parts: dict[int, list[Array]] = collections.defaultdict(list)
    for bucket, total in zip(plan.buckets, totals, strict=True):
        if bucket.stripe is not None:
            continue
        if bucket.part is not None:
            sizes = [bucket.size]
        else:
            shapes = [operation.shape(leaves[index]) for index in bucket.leaves]
            sizes = [math.prod(shape) // operation.result_rows for shape in shapes]
        pieces = split_rows(total, sizes, operation.result_rows)
        for index, piece in zip(bucket.leaves, pieces, strict=True):
            parts[index].append(piece)
    return {
        index: _result(
            operation,
            chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=1),
            leaves[index],
        )
        for index, chunks in parts.items()
    }


def _result(operation: Operation, rows: Array, leaf: Any) -> Array:
    """Return the result of a leaf from its rows."""
    return operation.restore(rows, leaf).astype(leaf.dtype)


def _counted(numbers: tuple[int, ...], states: States) -> tuple[Any, Any, Any]:
    """Return what a loop over buckets runs through: places, numbers and states."""
    places = np.arange(len(numbers), dtype=np.int32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(states[n] for n in numbers))
    return places, np.array(numbers, np.int32), stacked


def _unstacked(tree: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda leaf, n=n: leaf[n], tree) for n in range(count)]
