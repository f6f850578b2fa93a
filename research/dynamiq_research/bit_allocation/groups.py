"""Leaves that share a budget: their buckets, and their bytes and errors at every budget."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import dynamiq_jax as dq
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.parts.collectives import Bucket, Plan, plan_without_arrays, resolve
from dynamiq_research.bit_allocation.error_curve import ErrorCurve, RowNorms
from pallas_kernels.codec import MAX_WIDTH

STEP = 0.25  # bits between the budgets of a grid: leaves of the same one share a compiled codec

Values = Callable[[int], NDArray[np.float32]]  # of a leaf, by its number


@dataclasses.dataclass(frozen=True, eq=False)
class SentTree:
    """Leaves of a tree, as one call sends them."""

    tree: Any
    axis_size: int | tuple[int, ...]
    compression: dq.Compression

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves, as a policy has them."""
        leaves = jax.tree_util.tree_leaves_with_path(self.tree)
        return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)

    @functools.cached_property
    def given(self) -> Plan:
        """Plan of the call with the methods of the user."""
        return plan_without_arrays(self.tree, self.axis_size, resolve(self.compression))

    @property
    def methods(self) -> tuple[Method | None, ...]:
        """Methods that the user gave; None for uncompressed leaves."""
        return self.given.methods

    def plan(self, methods: Sequence[Method | None]) -> Plan:
        """Plan the call with a method for each leaf."""
        return plan_without_arrays(self.tree, self.axis_size, resolve(self._with(methods)))

    def bytes_sent(self, methods: Sequence[Method | None]) -> int:
        """Count the bytes that each worker sends over the slow axis."""
        return dq.wire_report(self.tree, self.axis_size, self._with(methods)).bytes_per_worker

    def _with(self, methods: Sequence[Method | None]) -> dq.Compression:
        by_path = dict(zip(self.paths, methods, strict=True))

        def of_leaf(path: str, leaf: Any) -> Method | str:
            return by_path[path] or "uncompressed"

        return dataclasses.replace(self.compression, method=of_leaf)


class Expected(NamedTuple):
    """Expected error of the leaves of a group in one compression, at each budget of its grid."""

    errors: NDArray[np.float64]  # squared, [budgets]
    costs: NDArray[np.float64]  # sum that the method minimizes, [budgets]
    energy: float  # squared norm
    cost: float  # the same sum, of rows that are lost


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Leaves whose bits are the same."""

    tree: SentTree
    buckets: tuple[Bucket, ...]  # those that hold all of them, and nothing else
    pattern: str | None = None  # of all leaves; None for a pattern of each

    @property
    def members(self) -> tuple[int, ...]:
        """Leaves of the group, by their numbers."""
        return tuple(sorted({index for bucket in self.buckets for index in bucket.leaves}))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of a policy that have these leaves in common."""
        if self.pattern is not None:
            return (self.pattern,)
        return tuple(exactly(self.tree.paths[index]) for index in self.members)

    @property
    def method(self) -> DynamiQ:
        """Method that the user gave."""
        (method,) = {bucket.method for bucket in self.buckets}
        assert isinstance(method, DynamiQ)
        return method

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(bucket.size for bucket in self.buckets)

    @functools.cached_property
    def grid(self) -> tuple[float, ...]:
        """Budgets that are compared, in bits: ascending, that of the user among them."""
        beside = 8 / self.method.group_size + 1 / 8  # bits of scales and norms
        widths = self.method.widths or range(2, MAX_WIDTH + 1)
        low = max(2.375, beside + min(widths))  # no DynamiQ has less
        high = min(float(MAX_WIDTH), beside + max(widths))
        even = STEP * np.arange(math.ceil(low / STEP), math.floor(high / STEP) + 1)
        return tuple(map(float, np.unique([low, *even, self.method.bits, high])))

    def bytes_sent(self, bits: float) -> int:
        """Count the bytes that each worker sends for the group at a budget."""
        method = dataclasses.replace(self.method, bits=bits)
        sent = 0
        for bucket in self.buckets:
            topology, num_workers = bucket.call.topology, bucket.call.num_workers
            sent += topology.bytes_sent(method.wire_cost(bucket.call), num_workers)
        return sent

    def measure(self, values: Values) -> "Expected":
        """Compute what one compression is expected to lose at each budget of the grid."""
        errors, energy = np.zeros((2, len(self.grid))), np.zeros(2)
        for bucket in self.buckets:
            layouts = [
                dataclasses.replace(self.method, bits=bits).layout_of(bucket.call)
                for bits in self.grid
            ]
            by_widths = {each.allocation: each for each in layouts}
            norms = RowNorms.of(self._flat(bucket, values))
            curves = {widths: ErrorCurve(norms, one) for widths, one in by_widths.items()}
            chunks = bucket.call.num_chunks * self.tree.given.collective.axes.num_fast
            expected = [curves[one.allocation].at(one.units * chunks) for one in layouts]
            errors += np.stack(expected, axis=1)
            energy += norms.squares.sum(), (norms.squares**self.method.exponent).sum()
        return Expected(*errors, *energy)

    def _flat(self, bucket: Bucket, values: Values) -> NDArray[np.float32]:
        leaves = [values(index) for index in bucket.leaves]
        if bucket.part is not None:
            leaves = [leaf[slice(*bucket.part)] for leaf in leaves]
        return np.concatenate([leaf.reshape(-1) for leaf in leaves])


def groups_of_buckets(tree: SentTree) -> Iterator[Group]:
    """Yield a group for every bucket of DynamiQ, or for all parts of a leaf that is cut."""
    together: dict[tuple[int, ...], list[Bucket]] = {}
    for bucket in tree.given.buckets:
        if isinstance(bucket.method, DynamiQ):
            together.setdefault(bucket.leaves, []).append(bucket)
    yield from (Group(tree, tuple(buckets)) for buckets in together.values())


def groups_of_patterns(patterns: Sequence[str], tree: SentTree) -> Iterator[tuple[Group, str]]:
    """Yield a group and its pattern for every pattern that leaves of DynamiQ have.

    Raises:
      ValueError: such a leaf has no pattern, or leaves of one have methods that differ.
    """
    members: dict[str, list[int]] = {pattern: [] for pattern in patterns}
    for group in groups_of_buckets(tree):
        for index in group.members:
            path = tree.paths[index]
            first_match = next((each for each in patterns if re.search(each, path)), None)
            if first_match is None:
                raise ValueError(
                    f"groups={list(patterns)!r:.200} have no pattern for the leaf {path!r}. Add "
                    "one, or '.*' as the last one, for all leaves that are left."
                )
            members[first_match].append(index)
    for pattern, own in members.items():
        methods = [method if n in own else None for n, method in enumerate(tree.methods)]
        found_methods = list(dict.fromkeys(method for method in methods if method is not None))
        if len(found_methods) > 1:
            raise ValueError(
                f"groups={list(patterns)!r:.200}: leaves of {pattern!r} have several methods, "
                f"{found_methods[0]!r} and {found_methods[1]!r}. Give patterns of leaves of one."
            )
        if buckets := tree.plan(methods).buckets:
            yield Group(tree, buckets, pattern), pattern


def exactly(path: str) -> str:
    """Return the pattern of one path."""
    return f"^{re.escape(path)}$"
