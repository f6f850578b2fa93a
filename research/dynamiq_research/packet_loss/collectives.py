"""Reduction of gradients and broadcast of parameters over a channel that loses packets."""

import dataclasses
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax import Compression
from dynamiq_jax.methods import Call, ChunkedMethod, Exact, Reduced, State
from dynamiq_jax.parts import Payload, as_chunks, check_choice, override, take_chunk
from dynamiq_jax.parts.collectives import (
    AllGather,
    Bucket,
    Choice,
    Leaves,
    ReduceScatter,
    after,
    check_agreement,
    check_chunked,
    check_key,
    find_axes,
    managed_axes,
    named_leaves,
    plan_tree,
    resolve,
    run,
)
from dynamiq_jax.topologies import AllToAll
from dynamiq_research.packet_loss.channel import LossyChannel
from dynamiq_research.packet_loss.spans import ByteSpans
from dynamiq_research.packet_loss.terms import terms_of

Tree = TypeVar("Tree")
Estimator = Literal["others", "count", "inverse"]
ESTIMATORS = ("others", "count", "inverse")

# Folded into the key: the losses of the two exchanges of a step are independent of each other, and
# of the rounding noise.
_GRADIENTS, _PARAMETERS = 0x6C6F7373, 0x706C6F73


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossyCollectives:
    """The two exchanges of a train step over a simulated channel that loses packets.

        channel = dynamiq_research.LossyChannel(rate=0.1)
        lossy = dynamiq_research.LossyCollectives(axis_name="data", channel=channel)

        gradient = lossy.scatter_mean(jax.grad(loss)(params, batch), key=key)
        own = lossy.own_parts(params)
        updates, opt_state = optimizer.update(gradient, opt_state, own)
        params = lossy.broadcast(optax.apply_updates(own, updates), params, key=key)

    This simulates: the collectives of JAX are reliable, so a lost packet is sent and then ignored.
    Each worker owns a part of each leaf. It estimates the mean gradient of its part from what
    arrives, updates it, and broadcasts the new *parameters*. A worker that misses a packet of these
    keeps its stale values. So workers differ, by a drift that does not grow: the next packet that
    arrives heals all that was missed. Parameters vary over the axis.

    Messages go directly from each worker to each owner. In a ring, a lost partial sum would take
    all workers in it along.

    A part is updated by one worker: the optimizer must treat coordinates on their own, as SGD and
    Adam do. A global norm would be that of a part.

    The estimate of the mean, with `n` workers and `k` others whose packet arrived:

    - "others": `own / n + (n - 1) / n * mean(arrived others)`. Unbiased if any other arrives and
      all links have the same rate. If none arrives, which has the probability `rate ** (n - 1)`,
      it is the own gradient alone. Workers behind worse links count less.
    - "count": the mean of the own gradient and those that arrived, as in the paper. At rate `p`,
      the own one has the mean weight `(1 - p**n) / (n (1 - p))` instead of `1 / n`: unbiased over
      batches that all workers draw alike, not for given gradients.
    - "inverse": `(own + sum(arrived others / q)) / n` (Horvitz and Thompson, 1952), with the
      probability `q` that a value arrives: `1 - rate` if it lies in one packet, less if its row
      lies in several. Unbiased with any rates, but its variance does not vanish where all workers
      agree, and is large where values lie in many packets.

    What is exchanged before the messages is small and counts as reliable: norms of DynamiQ, 2 bytes
    for 256 coordinates, and the statistics of other methods.

    The system is that of Weintraub, Banner and Orda, Distributed Training under Packet Loss
    (arXiv 2507.07114), after its abstract and a review; the estimators "others" and "inverse",
    bursts and compressed messages are ours.
    """

    axis_name: str  # axis of the workers; one
    channel: LossyChannel
    # Of the gradients. Each row of 256 is lost if a packet is lost that holds any byte of it. A
    # number of Exact and BF16 is in one packet; a message of EntropyCoded is lost as a whole.
    method: Choice = Compression()
    estimator: Estimator = "others"
    # Whether the bytes of a row of 256 are sent next to each other, in order of the rows. Messages
    # are sent as they are otherwise, and a row of DynamiQ lies in as many places as it has bits.
    rows_together: bool = False
    # Leaves that stay float32, which lose packets too, and the size of buckets.

    def __post_init__(self):
        if not isinstance(self.axis_name, str):
            raise ValueError(f"axis_name={self.axis_name!r} is not one axis. Give its name.")
        if not isinstance(self.channel, LossyChannel):
            raise TypeError(
                f"channel={self.channel!r} is not a channel. Give a dynamiq_research.LossyChannel."
            )
        check_choice("estimator", self.estimator, ESTIMATORS)
        for method in resolve(self.method).compression.policy.known:
            check_chunked(method, "dynamiq_research.LossyCollectives")
        if self.estimator == "inverse" and self.channel.highest_rate == 1:
            raise ValueError(
                "estimator='inverse' divides by the probability of arrival, which is 0 where "
                "rate=1. Give another estimator, or rates below 1."
            )

    def scatter_mean(self, tree: Tree, *, key: Array) -> Tree:
        """Estimate this worker's parts of the mean of a pytree, from the packets that arrive.

        Call it inside `jax.shard_map`, or inside `jax.vmap(..., axis_name=...)`.

        Args:
          tree: pytree of floating arrays, such as gradients.
          key: PRNG key, the same on all workers, a different key at every step.

        Returns:
          A tree of the same structure and dtypes: of each leaf the part of `own_parts`, of shape
          [ceil(size / workers)]. NaN and Inf surface if they arrive. At rate 0 these are the bits
          of `dq.psum_scatter` over `"all_to_all"`, divided by the number of workers.

        Raises:
          ValueError: as `dq.psum_scatter`; a leaf that is not floating, or is split over other axes
            of the mesh.
        """
        axes = find_axes(self.axis_name, single=True)
        self._check(tree)
        key = check_key(key, (self.axis_name,))
        compression = resolve(self._direct, settings=self._settings)
        of_gradients = jax.random.fold_in(key, _GRADIENTS)
        operation = _LossyReduceScatter(axes, lossy=self, key=of_gradients)
        rows = jax.tree.map(lambda leaf: _rows(leaf, axes.num_workers), tree)
        return run(operation, rows, key, compression).tree

    @property
    def _direct(self) -> Compression:
        return dataclasses.replace(Compression.of(self.method), topology="all_to_all")

    def own_parts(self, tree: Tree) -> Tree:
        """Return the parts of a pytree that this worker owns.

        Each leaf is flattened, padded with zeros and cut into equal parts, one for each worker in
        order: shapes [ceil(size / workers)].
        """
        axis = find_axes(self.axis_name, single=True).slow
        self._check(tree)
        return jax.tree.map(lambda leaf: _rows(leaf, axis.size)[axis.index], tree)

    def broadcast(self, parts: Tree, tree: Tree, *, key: Array) -> Tree:
        """Send this worker's parts to all workers; values whose packet is lost stay as they are.

        Parts are sent in the dtypes of their leaves, without compression.

        Args:
          parts: new values of the parts of `own_parts`.
          tree: the old values, of which each worker may have others.
          key: PRNG key, the same on all workers, a different key at every step; that of
            `scatter_mean` may be used again.

        Returns:
          The tree with all values that arrived. This worker's own parts are always new.

        Raises:
          ValueError: parts that do not fit the tree; a leaf that is not floating, or is split over
            other axes of the mesh.
        """
        axis = find_axes(self.axis_name, single=True).slow
        self._check(tree)
        key = check_key(key, (self.axis_name,))
        _check_parts(parts, tree, axis.size)
        compression = resolve(
            dataclasses.replace(self._direct, method="exact"), settings=self._settings
        )
        plan, _ = plan_tree(AllGather(find_axes(self.axis_name, single=True)), parts, compression)
        check_agreement(plan, key)
        leaves, structure = jax.tree.flatten(tree)
        words = [_as_words(part) for part in jax.tree.leaves(parts)]
        # The message is all parts, one after the other, those of wide numbers first: so no number
        # lies in two packets.
        order = sorted(range(len(words)), key=lambda index: -words[index].dtype.itemsize)
        message_bytes = sum(word.size * word.dtype.itemsize for word in words)
        arrived = self.channel.arrived(
            jax.random.fold_in(key, _PARAMETERS),
            axis.size,
            axis.index,
            self.channel.num_packets(message_bytes),
        )
        result, before = list(leaves), 0
        for index in order:
            leaf, word = leaves[index], words[index]
            size = word.dtype.itemsize
            of_message = jnp.repeat(arrived, self.channel.packet_bytes // size, axis=1)
            is_new = of_message[:, before // size : before // size + word.size]
            new = lax.bitcast_convert_type(axis.gather(word), leaf.dtype)
            rows = jnp.where(is_new, new, _rows(leaf, axis.size))
            result[index] = rows.reshape(-1)[: leaf.size].reshape(leaf.shape)
            before += word.size * size
        return jax.tree.unflatten(structure, result)

    @property
    def _settings(self) -> dict[str, Any]:
        """Settings that decide what is sent, and what is ignored: the same in all processes."""
        names = ("channel", "estimator", "rows_together")
        return {name: getattr(self, name) for name in names}

    def _check(self, tree: Any) -> None:
        """Raise ValueError for a leaf that is not floating, or that further axes split."""
        named, _ = named_leaves(tree)
        for name, leaf in named:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"tree{name} has dtype {leaf.dtype}, which has no meaning where packets are "
                    "lost. Give floating leaves, and keep others out of the tree."
                )
        if managed := managed_axes(jax.sharding.get_abstract_mesh()):
            raise ValueError(
                f"The mesh has axes {tuple(managed)} that the compiler manages, which may split "
                "leaves. Make all axes of the mesh manual: leave axis_names= of jax.shard_map out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # an array cannot be compared
class _LossyReduceScatter(ReduceScatter):
    """Mean of what arrives, of leaves [workers, coordinates]: every worker its own row."""

    lossy: LossyCollectives
    key: Array  # of the losses of leaves that are not compressed

    @override
    def exact(self, leaves: Leaves, token: Array | None = None) -> tuple[Leaves, list[Array]]:
        if self._loses_nothing or not any(leaf.size for leaf in leaves.values()):
            sums, arrived = super().exact(leaves, token)
            return {index: self._mean(total) for index, total in sums.items()}, arrived
        flat = after(
            token,
            jnp.concatenate([leaf.astype(jnp.float32) for leaf in leaves.values()], axis=1).reshape(
                -1
            ),
        )
        call = self._call(Call(size=flat.size, axis=self.axes.slow, topology=AllToAll()))
        mean = self._estimate(Exact(), flat, call, (self.key, self.key))
        ends = np.cumsum([leaf.shape[1] for leaf in leaves.values()])
        parts = jnp.split(mean, ends[:-1])
        result = {
            index: part.astype(leaf.dtype)
            for (index, leaf), part in zip(leaves.items(), parts, strict=True)
        }
        return result, [mean]

    @override
    def send(self, bucket: Bucket, flat: Array, key: Array, state: State) -> Reduced:
        if self._loses_nothing:
            reduced = super().send(bucket, flat, key, state)
            return dataclasses.replace(reduced, total=self._mean(reduced.total))
        call = self._call(bucket.call.of_size(flat.size))
        assert isinstance(bucket.method, ChunkedMethod)
        of_losses = jax.random.fold_in(key, _GRADIENTS)
        mean = self._estimate(bucket.method, flat, call, (key, of_losses))
        return Reduced(mean, mean)

    @property
    def _loses_nothing(self) -> bool:
        return self.axes.num_workers == 1 or self.lossy.channel.highest_rate == 0

    def _mean(self, total: Array) -> Array:
        return total * total.dtype.type(1 / self.axes.num_workers)

    def _call(self, call: Call) -> Call:
        return dataclasses.replace(call, collective="psum_scatter")

    def _estimate(
        self, method: ChunkedMethod, flat: Array, call: Call, keys: tuple[Array, Array]
    ) -> Array:
        """Estimate the mean of this worker's chunk, float32 [chunk size].

        The keys are those of the rounding noise and of the losses.
        """
        codec = method.bind(flat, call, keys[0])
        parts = terms_of(method, codec)
        axis, channel, others = call.axis, self.lossy.channel, call.num_workers - 1
        messages, chunk, _ = call.topology.arrival(codec, axis)
        message_bytes = _num_bytes(messages) // others
        senders = (axis.index + 1 + jnp.arange(others)) % axis.size  # in the order of arrivals
        spans = parts.byte_spans(chunk)
        if spans is None:  # all terms are one group, which depends on all bytes
            spans = ByteSpans.of_sections(1, (message_bytes,))
        if self.lossy.rows_together:
            spans, message_bytes = spans.side_by_side(), spans.size
        number = channel.num_packets(message_bytes)
        arrived = channel.arrived(keys[1], axis.size, axis.index, number)[senders]
        is_here = jax.vmap(lambda each: channel.intact(spans, each))(arrived)
        chances = channel.chance_intact(spans, axis.size, axis.index)[senders]
        of_own, of_others = _weights(self.lossy.estimator, is_here, chances)
        local = parts.local_terms(chunk).reshape(len(of_own), -1)

        def add(index: Array, total: Array) -> Array:
            message = jax.tree.map(lambda leaf: take_chunk(leaf, index), messages)
            terms = parts.terms(message, chunk).reshape(total.shape)
            weighted = take_chunk(of_others, index)[:, None] * terms
            # Not a product with zero: lost bytes may decode to NaN.
            return total + jnp.where(take_chunk(is_here, index)[:, None], weighted, np.float32(0))

        total = lax.fori_loop(0, others, add, of_own[:, None] * local)
        return self._mean(parts.values_of_terms(total.reshape(-1), chunk))


def _weights(estimator: Estimator, is_here: Array, chances: Array) -> tuple[Array, Array]:
    """Return the weights of terms in the estimate of a sum.

    Args:
      estimator: name of the estimate.
      is_here: which groups of terms arrived from each other worker, bool [others, groups].
      chances: probability of that, float32 [others, groups].

    Returns:
      The weights of own terms, float32 [groups], and of those that arrived, [others, groups].
    """
    others = np.float32(len(is_here))
    arrived = jnp.sum(is_here, axis=0, dtype=jnp.float32)
    one = jnp.ones_like(arrived)
    match estimator:
        case "others":
            of_own = jnp.where(arrived > 0, one, others + 1)
            return of_own, jnp.broadcast_to(others / jnp.maximum(arrived, 1), is_here.shape)
        case "count":
            of_each = (others + 1) / (arrived + 1)
            return of_each, jnp.broadcast_to(of_each, is_here.shape)
        case "inverse":
            return one, 1 / chances


def _rows(leaf: Array, workers: int) -> Array:
    """Flatten a leaf, pad it with zeros and cut it: [workers, ceil(size / workers)]."""
    return as_chunks(jnp.asarray(leaf).reshape(-1), workers)


def _as_words(part: Array) -> Array:
    """Return the bits of floats as integers, which XLA neither widens nor rounds."""
    return lax.bitcast_convert_type(part, jnp.dtype(f"uint{8 * part.dtype.itemsize}"))


def _num_bytes(messages: Payload) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(messages))


def _check_parts(parts: Any, tree: Any, workers: int) -> None:
    """Raise ValueError for parts that are not those of a tree."""

    def part_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((-(-leaf.size // workers),), leaf.dtype)

    def described(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}"

    given = jax.tree.map(described, parts)
    wanted = jax.tree.map(lambda leaf: described(part_of(leaf)), tree)
    if given != wanted:
        raise ValueError(
            f"parts={given!r:.200} are not the parts of this tree, {wanted!r:.200}. Give the "
            "updated result of own_parts, in the dtypes of the tree."
        )
