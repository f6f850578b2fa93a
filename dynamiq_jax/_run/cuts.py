"""Cuts of leaves: the vector of each bucket of a group, and back.

A loop over the buckets of a group carries some arrays. In each turn, `take` returns the values of
one bucket, and `put` gets its result.
"""

import abc
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import cutting
from dynamiq_jax._buckets.buckets import Bucket
from dynamiq_jax._buckets.dealing import Dealing
from dynamiq_jax._collectives.collective import Collective, Leaves
from pallas_kernels._jax import compat
from pallas_kernels._jax.compat import override

Rows = list[Array]  # of leaves, or of parts of them: [rows, coordinates]
Carried = tuple[Array, ...]


class Cut(abc.ABC):
    """Cut of leaves into the vectors of one bucket, or of several that are alike."""

    start: Carried = ()  # arrays that a loop carries, before its first turn

    def __init__(self, collective: Collective, buckets: Sequence[Bucket], leaves: Leaves):
        self.collective, self.buckets, self.leaves = collective, tuple(buckets), leaves

    @abc.abstractmethod
    def take(self, carried: Carried, place: Any) -> Rows:
        """Return the values of the bucket at a place in the group: a constant, or int32."""

    @abc.abstractmethod
    def put(self, carried: Carried, place: Any, total: Array) -> tuple[Carried, Array]:
        """Write a result to the carried arrays, and return these and what the loop stacks."""

    @abc.abstractmethod
    def pieces(self, carried: Carried, stacked: Sequence[Array]) -> list[Leaves]:
        """Return, for each bucket, the result rows of its leaves, or of their parts, by index."""


class WholeCut(Cut):
    """Cut into whole leaves, or parts of one along its first dimension; a loop stacks results."""

    @override
    def take(self, carried: Carried, place: Any) -> Rows:
        if len(self.buckets) == 1:
            return self._members(self.buckets[0])
        parts = [bucket.part for bucket in self.buckets if bucket.part is not None]
        leaf = self.leaves[self.buckets[0].leaves[0]]
        if (
            len(parts) == len(self.buckets)
            and len({bucket.leaves for bucket in self.buckets}) == 1
            and leaf.shape[0] <= np.iinfo(np.int32).max
        ):
            starts = jnp.asarray([start for start, _ in parts], jnp.int32)
            part = lax.dynamic_slice_in_dim(leaf, starts[place], parts[0][1] - parts[0][0])
            return [self.collective.rows(part)]
        branches = [functools.partial(self._joined, bucket) for bucket in self.buckets]
        return [lax.switch(place, branches)]

    @override
    def put(self, carried: Carried, place: Any, total: Array) -> tuple[Carried, Array]:
        return carried, total

    @override
    def pieces(self, carried: Carried, stacked: Sequence[Array]) -> list[Leaves]:
        return [
            pieces_of(self.collective, bucket, self.leaves, total)
            for bucket, total in zip(self.buckets, stacked, strict=True)
        ]

    def _members(self, bucket: Bucket) -> Rows:
        members = [self.leaves[index] for index in bucket.leaves]
        if bucket.part is not None:
            members = [members[0][slice(*bucket.part)]]
        return [self.collective.rows(leaf) for leaf in members]

    def _joined(self, bucket: Bucket) -> Array:
        return jnp.concatenate(self._members(bucket), axis=1)


class StripedCut(Cut):
    """Cut into stripes of all leaves. The loop carries the results.

    Results of the same shape replace the values of this worker. Then both share one memory.
    """

    def __init__(self, collective: Collective, buckets: Sequence[Bucket], leaves: Leaves):
        super().__init__(collective, buckets, leaves)
        rows = [_as_words(collective.rows(leaves[index])) for index in self.buckets[0].leaves]
        self._dealing = Dealing(tuple(leaf.shape[1] for leaf in rows), len(self.buckets))
        dealt = self._dealing.deal(rows)
        in_place = collective.result_rows == len(rows[0])
        self._values = None if in_place else dealt
        self.start = dealt if in_place else self._dealing.zeros(collective.result_rows, dealt)

    @override
    def take(self, carried: Carried, place: Any) -> Rows:
        dealt = carried if self._values is None else self._values
        return [lax.bitcast_convert_type(self._dealing.take(dealt, place), self.buckets[0].dtype)]

    @override
    def put(self, carried: Carried, place: Any, total: Array) -> tuple[Carried, Array]:
        nothing = total[:0]  # its type has the axes over which results vary
        total = compat.match_varying(total.astype(self.buckets[0].dtype), carried[0])
        rows = total.reshape(self.collective.result_rows, -1)[:, : self._dealing.size]
        return self._dealing.put(carried, place, _as_words(rows)), nothing

    @override
    def pieces(self, carried: Carried, stacked: Sequence[Array]) -> list[Leaves]:
        for axis in compat.varying_axes(carried[0]) - compat.varying_axes(stacked[0]):
            carried = compat.same_over(carried, axis)
        dtype = self.buckets[0].dtype
        rows = [lax.bitcast_convert_type(each, dtype) for each in self._dealing.undeal(carried)]
        whole = dict(zip(self.buckets[0].leaves, rows, strict=True))
        return [whole, *({} for _ in self.buckets[1:])]


def _as_words(rows: Array) -> Array:
    """Return floats of less than 32 bits as integers.

    XLA for CPUs writes rows into an array of such floats by way of float32, all of it each time.
    """
    bits = 8 * rows.dtype.itemsize
    return lax.bitcast_convert_type(rows, jnp.dtype(f"uint{bits}")) if bits < 32 else rows


def cut(collective: Collective, buckets: Sequence[Bucket], leaves: Leaves) -> Cut:
    """Cut the leaves of the buckets of a group."""
    kind = WholeCut if buckets[0].stripe is None else StripedCut
    return kind(collective, buckets, leaves)


def pieces_of(collective: Collective, bucket: Bucket, leaves: Leaves, total: Array) -> Leaves:
    """Cut the result of a bucket of whole leaves, or of a part of one, into rows by leaf."""
    sizes = [bucket.size]
    if bucket.part is None:
        shapes = [collective.shape(leaves[index]) for index in bucket.leaves]
        sizes = [math.prod(shape) // collective.result_rows for shape in shapes]
    rows = cutting.cut(total.reshape(collective.result_rows, -1), sizes)
    return dict(zip(bucket.leaves, rows, strict=True))


def joined(collective: Collective, pieces: Sequence[Leaves], leaves: Leaves) -> Leaves:
    """Join the pieces of each leaf, in the order of the buckets, to results by index."""
    of_leaves: dict[int, Rows] = {}
    for piece in pieces:
        for index, rows in piece.items():
            of_leaves.setdefault(index, []).append(rows)
    results = {}
    for index, parts in of_leaves.items():
        rows = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        results[index] = collective.restore(rows, leaves[index]).astype(leaves[index].dtype)
    return results
