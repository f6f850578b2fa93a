"""Loop of all collectives over the buckets of a plan, on the leaves of one device."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import scopes
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._buckets.cutting import as_vector
from dynamiq_jax._buckets.order import after, token_of
from dynamiq_jax._collectives.collective import Leaves
from dynamiq_jax._plan.plan import Plan
from dynamiq_jax._run.cuts import Carried, Cut, cut, joined
from dynamiq_jax._run.sample import fold_in_sample
from dynamiq_jax._states.states import States
from dynamiq_jax.methods import Reduced, State

Transfer = Callable[[Bucket, Array, Array, State], Reduced]


def send_all(
    plan: Plan,
    leaves: Leaves,
    key: Array,
    states: States,
    token: Array | None,
    sampled_over: Sequence[str] | None,
) -> tuple[Leaves, States, Mapping[str, Array], Array | None]:
    """Run a collective on the leaves of one device, one bucket after the other.

    Untouched leaves may be missing. Each bucket of the plan has a state. Samples of all devices
    along `sampled_over` are folded into the keys of their buckets.

    Returns:
      Results by index; states for the next step; metrics of the method, which are means over
      buckets weighted by coordinates; and a token that is available after all transfers.
    """
    collective = plan.collective
    sent: dict[int, Reduced] = {}
    pieces: dict[int, Leaves] = {}
    transfer = transfer_of(plan)
    for numbers in plan.groups:
        buckets = [plan.buckets[number] for number in numbers]
        group, group_key = cut(collective, buckets, leaves), key
        if sampled_over is not None:  # of no other leaves than those of the group
            own = sorted({index for bucket in buckets for index in bucket.leaves})
            group_key = fold_in_sample(key, [leaves[i] for i in own], sampled_over, token)
        of_group, carried = send_group(transfer, numbers, group, states, token, group_key)
        rows = group.pieces(carried, [one.total for one in of_group])
        sent |= dict(zip(numbers, of_group, strict=True))
        pieces |= dict(zip(numbers, rows, strict=True))
        token = of_group[-1].token
    order = sorted(sent, reverse=collective.last_first)
    metrics = _means([(plan.buckets[number].size, sent[number].metrics) for number in order])
    in_order = [sent[number] for number in range(len(plan.buckets))]
    exactly = {index: leaves[index] for index, _ in plan.exact}
    if plan.request.measures:
        measured = [one.measured for one in in_order]
        metrics |= collective.summary(plan.buckets, measured, [*exactly.values()])
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


def send_group(
    transfer: Transfer,
    numbers: tuple[int, ...],
    group: Cut,
    states: States,
    token: Array | None,
    key: Array,
) -> tuple[list[Reduced], Carried]:
    """Send the buckets of a group, in a loop if there are several, once a token is available.

    Returns:
      Results of the buckets, and the arrays that the loop carried.
    """
    first = group.buckets[0]
    multiple = group.collective.multiple(first)

    def turn(carried: Carried, each: Any) -> tuple[Carried, Reduced]:
        place, number, state = each
        flat = _refuse_gradient(as_vector(group.take(carried, place), multiple))
        sent = transfer(first, after(token, flat), key_of(key, first, number), state)
        carried, total = group.put(carried, place, sent.total)
        return carried, dataclasses.replace(sent, total=total)

    if len(numbers) == 1:
        carried, sent = turn(group.start, (0, numbers[0], states[numbers[0]]))
        return [sent], carried
    places = np.arange(len(numbers), dtype=np.int32)
    of_group = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(states[n] for n in numbers))
    turns = places, np.array(numbers, np.int32), of_group
    carried, stacked = lax.scan(turn, group.start, turns)
    return [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in range(len(numbers))], carried


def transfer_of(plan: Plan) -> Transfer:
    """Return the transfer of a bucket, which is traced once for all buckets of one program.

    Returns:
      Function of a bucket, its vector, its key and its state. What a worker applied is left out.
    """

    def transfer(bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        reduced = plan.collective.transfer(bucket, flat, key, state)
        names = plan.request.metrics([bucket.method])
        metrics = {name: reduced.metrics[name] for name in names if name in reduced.metrics}
        return dataclasses.replace(reduced, applied=None, metrics=metrics)

    jitted = jax.jit(transfer, static_argnums=0)

    def run(bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        # Without jit, the loops of a codec would take minutes.
        with jax.disable_jit(False):
            return jitted(bucket.program, flat, key, state)

    return run


def key_of(key: Array, bucket: Bucket, number: Any) -> Array:
    """Return the key of a bucket."""
    key = jax.random.fold_in(key, number)
    if bucket.split_over:  # different shards get different noise, on any mesh
        key = jax.random.fold_in(key, lax.axis_index(bucket.split_over))
    return key


def _refuse_gradient(flat: Array) -> Array:
    """Return `flat`, and raise an error if it is differentiated.

    The gradient of a rounded value is zero, an error that would otherwise pass unnoticed.
    """
    # A view: under vmap inside jit, `jax.custom_vjp` fails on NumPy arrays.
    return lax.squeeze(_refusing(lax.expand_dims(flat, (0,))), (0,))


@jax.custom_vjp
def _refusing(flat: Array) -> Array:
    return flat


def _refuse(*_: Any) -> Any:
    raise ValueError(
        "Compressed sums (dq.psum, dq.pmean, dq.psum_scatter) cannot be differentiated: rounding "
        "has no useful gradient. Take the gradient first and reduce it afterwards, or use "
        "dq.all_gather, whose transpose is a compressed sum. For a gradient of a gradient, such as "
        "a penalty or a Hessian-vector product, take both of the plain loss, and give the whole "
        "step to dq.compress."
    )


_refusing.defvjp(_refuse, _refuse)
