"""Bits of each bucket from gradients: the least expected error in the bytes of equal bits."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import dynamiq_jax as dq
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.parts import override
from dynamiq_jax.parts.collectives import Choice
from dynamiq_research.bit_allocation.groups import (
    Expected,
    Group,
    SentTree,
    exactly,
    groups_of_buckets,
    groups_of_patterns,
)
from dynamiq_research.bit_allocation.shared_budget import SharedBudget

_ATTEMPTS = 8  # to meet the bytes: leaves of equal bits join buckets, which changes the padding
_NEAR = 0.998  # of the bytes: near enough


class GroupBits(NamedTuple):
    """Leaves that share a number of bits."""

    patterns: tuple[str, ...]  # of the policy
    size: int  # coordinates
    bits: float  # per coordinate, everything included
    energy: float  # share of the squared norm of all groups
    error: float  # expected squared error, over the squared norm of all groups


@dataclasses.dataclass(frozen=True)
class BitAllocation:
    """Policy with the bits of each group of leaves, and the error that it is expected to have.

    Errors are errors of one compression of normal values. A sum has larger errors, in about the
    same ratio. As text, the allocation is a table of the groups.
    """

    policy: Mapping[str, Method | str]  # pattern of paths to its method
    compression: dq.Compression  # with this policy and buckets in order, for `method=`
    groups: tuple[GroupBits, ...]
    uniform_error: float  # expected vNMSE with the bits that were given, the same for all leaves
    error: float  # expected vNMSE with the policy
    uniform_bytes: int  # sent by each worker with the bits that were given
    bytes_per_worker: int  # sent by each worker with the policy: at most as many

    @property
    def gain(self) -> float:
        """Factor by which the error is expected to fall."""
        return self.uniform_error / self.error if self.error else 1.0

    @property
    def bits(self) -> dict[str, float]:
        """Bits of each pattern."""
        return {pattern: group.bits for group in self.groups for pattern in group.patterns}

    @override
    def __str__(self) -> str:
        rows = [("leaves", "size", "energy", "bits", "error")]
        for group in self.groups:
            more = f" and {len(group.patterns) - 1} more" if len(group.patterns) > 1 else ""
            numbers = f"{group.size:,}", f"{group.energy:.1%}", f"{group.bits:g}"
            rows.append((group.patterns[0] + more, *numbers, f"{group.error:.1e}"))
        size = sum(group.size for group in self.groups)
        rows.append(("all", f"{size:,}", "", "", f"{self.error:.1e}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([f"{first:<{widths[0]}}", *map(str.rjust, others, widths[1:])])
            for first, *others in rows
        ]
        sent = f"{self.bytes_per_worker:,} of {self.uniform_bytes:,} bytes"
        lines.append(
            f"expected error {self.gain:.2f} times lower than {self.uniform_error:.1e}, in {sent}"
        )
        return "\n".join(lines)


def allocate_bits(
    *gradients: Any,
    axis_size: int | tuple[int, ...],
    method: Choice = dq.Compression(),
    groups: Sequence[str] | None = None,
) -> BitAllocation:
    """Give each bucket the bits that its gradients need, in the bytes of equal bits.

    Buckets have to be in order. Striped buckets share their bits already; see
    `Compression.bucketing`.

    DynamiQ spends the bits of a bucket where its energy is, but no bits of another bucket. This
    function compares buckets. It takes bits from buckets whose error hardly counts, and gives them
    to the buckets that have most of the error. The result is a compression for `method=`:

        in_order = dq.Compression("dynamiq:5", bucketing="in_order")
        found = dynamiq_research.allocate_bits(gradients, axis_size=8, method=in_order)
        grads = dq.pmean(grads, "data", found.compression)

    From the norms of rows of 256 coordinates follows the expected error of a bucket at every
    budget. The best budgets have the same return for a byte. They are multiples of a quarter of a
    bit, except for one group that gets the rest: leaves of the same bits share a method, and so
    buckets and a compiled codec. The result depends on the arguments alone.

    Call it outside of `jax.jit`, with gradients of some steps. The shares of the leaves change
    slowly in training, and a phase of a `Schedule` can have a new policy.

    Args:
      *gradients: trees of gradients, each of one step: of one worker, or means over workers. All
        have the same structure and shapes, and steps count alike.
      axis_size: number of workers, or the sizes of several axes, slowest link first.
      method: DynamiQ with the bits to compare with, or a policy. Only leaves of DynamiQ get other
        bits, and these methods keep their other fields. Errors are counted by their `exponent`.
      groups: patterns of paths, as in a policy: the leaves that the first matching pattern has in
        common share bits. None: the leaves of a bucket do.

    Returns:
      A `BitAllocation`. It sends no more bytes than `method`, and about as many.

    Raises:
      ValueError: striped buckets; no gradients, or trees that differ; values that are NaN or Inf,
        or all zero; no leaf that DynamiQ compresses; patterns that do not fit; arrays that are
        traced; or as `wire_report`.

    >>> rng = np.random.default_rng(0)
    >>> small, large = (rng.normal(0, scale, 2**16).astype(np.float32) for scale in (0.1, 1))
    >>> small_buckets = dq.Compression(bucket_bytes=2**18)  # so that each leaf has a bucket
    >>> found = allocate_bits({"a": small, "b": large}, axis_size=4, method=small_buckets)
    >>> found.bits
    {'^a$': 3.5, '^b$': 6.5}
    """
    compression = dq.Compression.of(method)
    if compression.bucketing == "striped":
        raise ValueError(
            "bucketing='striped': striped buckets share their bits already, and none has bits to "
            "give to another. Give dq.Compression(bucketing='in_order'), for buckets that need it."
        )
    steps = _steps_of(gradients)
    in_order = dataclasses.replace(compression, bucketing="in_order")
    tree = SentTree(gradients[0], axis_size, in_order)
    equal = list(groups_of_buckets(tree))
    if not equal:
        raise ValueError(
            f"method={method!r:.200}: DynamiQ compresses none of the {len(steps[0])} leaves with "
            f"axis_size={axis_size!r}, and other methods have no bits to give to another bucket. "
            "Give method='dynamiq:5', several workers, and dq.Compression(exact_below=0) if all "
            "leaves are small."
        )
    if len(exponents := {group.method.exponent for group in equal}) > 1:
        raise ValueError(
            f"method={method!r:.200}: errors with the exponents {sorted(exponents)} cannot be "
            "compared. Give all leaves of DynamiQ the same exponent."
        )
    uniform = _measured(equal, steps)
    shared = uniform if groups is None else _measured(_by_patterns(groups, tree), steps)
    bits = _bits_within(shared, tree, equal)
    errors = shared.errors_of(bits)
    policy = _policy(tree, shared.groups, bits)
    return BitAllocation(
        policy=policy,
        compression=dataclasses.replace(in_order, method=policy),
        groups=tuple(
            GroupBits(group.patterns, group.size, one, float(energy), error)
            for group, one, energy, error in zip(
                shared.groups, bits, shared.energies, errors, strict=True
            )
        ),
        uniform_error=sum(uniform.errors_of(uniform.given)),
        error=sum(errors),
        uniform_bytes=tree.bytes_sent(tree.methods),
        bytes_per_worker=tree.bytes_sent(_methods(shared, tree, bits)),
    )


def _steps_of(gradients: Sequence[Any]) -> list[list[Any]]:
    """Return the leaves of every tree.

    Raises:
      ValueError: there is none, or they are not alike, or have no values here.
    """
    if not gradients:
        raise ValueError("gradients are missing. Give a tree of gradients, or several trees.")
    structures: list[Any] = [jax.tree.structure(tree) for tree in gradients]
    shapes = [list(map(np.shape, jax.tree.leaves(tree))) for tree in gradients]
    for number, tree in enumerate(gradients):
        if structures[number] != structures[0] or shapes[number] != shapes[0]:
            raise ValueError(
                f"gradients[{number}] has another structure or other shapes than gradients[0]: "
                f"{structures[number]!s:.200}. Give trees of several steps of one model."
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
                where = jax.tree_util.keystr(path, simple=True, separator="/")
                raise ValueError(
                    f"gradients[{number}] has no values at {where!r}: {leaf!r:.80}. Give arrays, "
                    "outside of jax.jit."
                )
    return [jax.tree.leaves(tree) for tree in gradients]


def _by_patterns(patterns: Sequence[str], tree: SentTree) -> list[Group]:
    """Return the groups of patterns; see `groups_of_patterns`.

    Raises:
      ValueError: they are no patterns, or one has no leaves.
    """
    try:
        if isinstance(patterns, str):
            raise TypeError("one string")
        for pattern in patterns:
            re.compile(pattern)
    except (TypeError, re.error) as error:
        raise ValueError(
            f"groups={patterns!r:.200} are no regular expressions: {error}. Give several, which "
            "are searched for in paths such as 'layers/0/kernel'."
        ) from None
    found = list(groups_of_patterns(patterns, tree))
    used = {pattern for _, pattern in found}
    if missing := [pattern for pattern in patterns if pattern not in used]:
        raise ValueError(
            f"groups={list(patterns)!r:.200}: no leaf is left for {missing[0]!r} that DynamiQ "
            "compresses. Patterns before may match all. Correct the pattern, or remove it."
        )
    return [group for group, _ in found]


def _measured(groups: Sequence[Group], steps: Sequence[Sequence[Any]]) -> SharedBudget:
    """Compute expected errors from the gradients of every step.

    Raises:
      ValueError: gradients that are not finite, or all zero.
    """
    expected = []
    for number, leaves in enumerate(steps):

        def measure(group: Group, number: int = number, leaves: Sequence[Any] = leaves) -> Expected:
            def values(member: int) -> NDArray[np.float32]:
                gradient = np.asarray(leaves[member]).astype(np.float32)
                if not np.isfinite(gradient).all():
                    path = group.tree.paths[member]
                    raise ValueError(
                        f"gradients[{number}] has NaN or Inf at {path!r}. Give gradients of a step "
                        "in which all are finite."
                    )
                return gradient

            return group.measure(values)

        expected.append([measure(group) for group in groups])
        if not sum(each.energy for each in expected[-1]):
            raise ValueError(
                f"gradients[{number}] are zero in all leaves that DynamiQ compresses. Give "
                "gradients of another step."
            )
    return SharedBudget.of(groups, expected)


def _bits_within(shared: SharedBudget, tree: SentTree, equal: Sequence[Group]) -> list[float]:
    """Return the best bits of groups whose methods send no more bytes than the user's."""
    most = tree.bytes_sent(tree.methods)
    budget = sum(group.bytes_sent(group.method.bits) for group in equal)
    best = shared.given
    for _ in range(_ATTEMPTS):
        bits = shared.solve(budget)
        sent = tree.bytes_sent(_methods(shared, tree, bits))
        if sent <= most and sum(shared.costs_of(bits)) < sum(shared.costs_of(best)):
            best = bits
        if _NEAR * most <= sent <= most:
            break
        budget += most - sent
    return best


def _methods(shared: SharedBudget, tree: SentTree, bits: Sequence[float]) -> list[Method | None]:
    """Return the methods of the leaves."""
    methods = list(tree.methods)
    for group, one in zip(shared.groups, bits, strict=True):
        for index in group.members:
            methods[index] = dataclasses.replace(group.method, bits=one)
    return methods


def _policy(
    tree: SentTree, groups: Sequence[Group], bits: Sequence[float]
) -> dict[str, Method | str]:
    """Return the policy of the groups and of all other leaves."""
    leaves = enumerate(tree.given.parts)
    floating = [n for n, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # First the leaves of other methods, which a pattern of a group may have too.
    rules: dict[str, Method | str] = {
        exactly(tree.paths[n]): tree.methods[n] or "uncompressed"
        for n in floating
        if not isinstance(tree.methods[n], DynamiQ)
    }
    for group, one in zip(groups, bits, strict=True):
        method = dataclasses.replace(group.method, bits=one)
        rules |= dict.fromkeys(group.patterns, method)
    left = [n for n in floating if not any(re.search(each, tree.paths[n]) for each in rules)]
    methods = {tree.methods[n] for n in left}
    if len(methods) == 1:  # leaves that are too small
        return rules | {".*": methods.pop() or "uncompressed"}
    return rules | {exactly(tree.paths[n]): tree.methods[n] or "uncompressed" for n in left}
