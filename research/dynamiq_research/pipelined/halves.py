"""The two halves of a mean over workers: shards of buckets, and back.

A shard is the part of a bucket's mean that one worker holds. Each bucket of the plan has the same
call in both halves, so that shards can be kept between them. Only the halves read shards. So the
rows of a bucket are dealt to its shards, and each shard is about like the bucket.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import dynamiq_jax as dq
from dynamiq_jax import topologies
from dynamiq_jax.methods import Call, ChunkCodec, ChunkedMethod, Method, Reduced, State
from dynamiq_jax.parts import Payload, override
from dynamiq_jax.parts.collectives import (
    AllGather,
    Axes,
    Bucket,
    Collective,
    CutRules,
    Leaves,
    Plan,
    after,
    all_reduce_exact,
    check_chunked,
    cut,
    joined,
    key_of,
    pieces_of,
    scope,
    send_group,
    spelled,
    token_of,
    transfer_of,
)
from dynamiq_research.pipelined import carrying
from dynamiq_research.pipelined.dealing import ShiftedDealing


@dataclasses.dataclass(frozen=True)
class _Half(Collective):
    """One half of a mean over all workers."""

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        return all_reduce_exact(leaves, self.axes, self.axes.num_workers, token)

    @override
    def rules(self, compression: dq.Compression) -> CutRules:
        if compression.bucketing == "striped":
            raise ValueError(
                "bucketing='striped' has no use in Pipelined, whose buckets leave while a "
                "backward pass computes others. Leave it out."
            )
        return CutRules("in_order", into_stripes=False)


@dataclasses.dataclass(frozen=True)
class ScatterMean(_Half):
    """First half: a mean, of which every worker gets its shard of each bucket."""

    @override
    def check_method(self, method: Method) -> None:
        check_chunked(method, "dynamiq_research.Pipelined")

    def bytes_sent(self, bucket: Bucket) -> int:
        """Count the bytes that each worker sends over the slow axis for a bucket."""
        cost = bucket.method.wire_cost(_call(bucket, "psum_scatter"))
        scattered = bucket.call.topology.bytes_scattered(cost, self.axes.slow.size)
        return cost.statistics_bytes + scattered

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        axes, call = self.axes, _call(bucket, "psum_scatter")
        dealing = dealing_of(bucket, axes)
        pieces = dealing.deal(flat)
        part = axes.scatter(pieces, call.size)
        assert isinstance(bucket.method, ChunkedMethod)
        codec = bucket.method.bind(part, call, axes.fold_in(key))
        scattered = call.topology.reduce_scatter(codec, axes.slow)
        worker: Array | int = 0
        for axis in (*reversed(axes.fast), axes.slow):  # in the order of the two scatters
            worker = worker * axis.size + axis.index
        places = dealing.places(jnp.reshape(worker, 1))
        # A method may decode padding to other values than zero. Norms of gradients exclude it.
        is_padding = places >= bucket.size
        mean = scattered.values * np.float32(1 / axes.num_workers)
        norms = carrying.carried(bucket.method, codec, call)
        mean = jnp.concatenate([jnp.where(is_padding, 0, mean), norms])
        return Reduced(mean, scattered.token)


@dataclasses.dataclass(frozen=True)
class GatherMean(_Half):
    """Second half: the mean on every worker, from the shards of all of them."""

    # A forward pass uses the first leaves first.
    last_first: bool = dataclasses.field(default=False, kw_only=True)
    salt: ClassVar[int | None] = AllGather.salt

    def bytes_sent(self, bucket: Bucket) -> int:
        """Count the bytes that each worker sends over the slow axis for a bucket."""
        cost = bucket.method.wire_cost(_call(bucket, "all_gather"))
        return cost.statistics_bytes + (self.axes.slow.size - 1) * cost.payload_bytes

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        return self.deliver(bucket, *self.encode(bucket, flat, key))

    def encode(self, bucket: Bucket, shard: Array, key: Array) -> tuple[ChunkCodec, Payload]:
        """Return the payload of a shard, and the codec that decodes the payloads of all workers."""
        assert isinstance(bucket.method, ChunkedMethod) and self.salt is not None
        call, axes = _call(bucket, "all_gather"), self.axes
        part, norms = jnp.split(shard, [shard_size(bucket)])
        with scope(spelled(bucket.method)):
            if norms.size:  # the last compression of the sum, with the noise of those before it
                codec = carrying.bind(bucket.method, part, norms, call, axes.fold_in(key))
                return codec, codec.compress(axes.slow.index, axes.slow.size - 1)
            key = jax.random.fold_in(key, self.salt)
            codec = bucket.method.bind(part, call, axes.fold_in(key))
            return codec, codec.compress(axes.slow.index, 0)

    def deliver(self, bucket: Bucket, codec: ChunkCodec, payload: Payload) -> Reduced:
        """Gather payloads and decode them."""
        with scope(spelled(bucket.method)):
            gathered = topologies.gather(codec, payload, self.axes.slow)
            part = gathered.decode().astype(bucket.dtype)
        dealing = dealing_of(bucket, self.axes)
        pieces = self.axes.gather(part, dealing.pieces * dealing.size)
        total = dealing.undeal(pieces)
        return Reduced(total, total if self.axes.fast else gathered.token)


def shard_size(bucket: Bucket) -> int:
    """Return the coordinates of a worker's shard of a bucket, padding included."""
    each = bucket.method.granule
    return -(-bucket.call.size // (bucket.call.num_workers * each)) * each


def held_size(bucket: Bucket) -> int:
    """Return the numbers that a worker holds of a bucket between the halves.

    They are its shard, and behind the shard the norms that the worker carries.
    """
    return shard_size(bucket) + carrying.num_carried(bucket.method, _call(bucket, "psum_scatter"))


def dealing_of(bucket: Bucket, axes: Axes) -> ShiftedDealing:
    """Return the dealing of the rows of a bucket to the chunks of all workers."""
    pieces = axes.num_fast * bucket.call.num_chunks
    return ShiftedDealing(bucket.size, pieces, bucket.method.granule)


def scatter(
    plan: Plan, leaves: Leaves, key: Array, token: Array | None
) -> tuple[tuple[Array, ...], Array | None]:
    """Run the first half on the leaves of one device.

    Args:
      plan: plan of a `ScatterMean`.
      leaves: leaves of this device, by index.
      key: typed PRNG key, the same on all workers.
      token: token that the first transfer waits for; see `order.after`.

    Returns:
      The worker's shard of each bucket's mean, and behind the shard the norms that the worker
      carries, float32 [held_size]; and a token that is available once all has arrived.
    """
    shards, states = dict[int, Array](), ((),) * len(plan.buckets)
    transfer = transfer_of(plan)
    for numbers in plan.groups:
        group = cut(plan.collective, [plan.buckets[number] for number in numbers], leaves)
        sent, _ = send_group(transfer, numbers, group, states, token, key)
        shards |= {number: one.total for number, one in zip(numbers, sent, strict=True)}
        token = sent[-1].token
    if shards:
        token = token_of([token])
    return tuple(shards[number] for number in range(len(shards))), token


def gather(
    plan: Plan, shards: tuple[Array, ...], key: Array, token: Array | None
) -> tuple[Leaves, Array | None]:
    """Run the second half on the shards of one device.

    Args:
      plan: plan of the first half, with a `GatherMean` in place of its collective.
      shards: the shards of the first half.
      key: typed PRNG key, the same on all workers. It may be the key of the first half.
      token: token that the first transfer waits for; see `order.after`.

    Returns:
      Means of the leaves in buckets, by index, the same bits on all workers; and a token that is
      available once all has arrived.
    """
    collective = plan.collective
    assert isinstance(collective, GatherMean)
    of_shards = tuple(
        dataclasses.replace(bucket, leaves=(number,), part=None)
        for number, bucket in enumerate(plan.buckets)
    )
    all_shards = dataclasses.replace(plan, buckets=of_shards)
    transfer, leaves = transfer_of(all_shards), dict(enumerate(shards))
    # All shards are here, and are encoded before the first gather. Otherwise the chain of transfers
    # would include the time of encoding, and of the statistics that workers exchange for it.
    encoded = {
        number: collective.encode(
            of_shards[number], shards[number], key_of(key, of_shards[number], number)
        )
        for (number,) in (group for group in all_shards.groups if len(group) == 1)
    }
    payloads = jax.tree.leaves([payload for _, payload in encoded.values()])
    token = token_of([token, *payloads])
    means: dict[int, Array] = {}
    for numbers in all_shards.groups:
        if len(numbers) == 1:
            codec, payload = encoded[numbers[0]]
            payload = jax.tree.map(functools.partial(after, token), payload)
            sent: Sequence[Reduced] = [collective.deliver(of_shards[numbers[0]], codec, payload)]
        else:
            group = cut(collective, [of_shards[number] for number in numbers], leaves)
            sent, _ = send_group(transfer, numbers, group, ((),) * len(shards), token, key)
        means |= {number: one.total for number, one in zip(numbers, sent, strict=True)}
        token = sent[-1].token
    parts = dict(enumerate(plan.parts))
    pieces = [
        pieces_of(collective, bucket, parts, means[number])
        for number, bucket in enumerate(plan.buckets)
    ]
    return joined(collective, pieces, parts), token_of([token])


def _call(bucket: Bucket, half: Literal["psum_scatter", "all_gather"]) -> Call:
    size = bucket.call.num_workers * shard_size(bucket)
    return dataclasses.replace(bucket.call.of_size(size), collective=half)
