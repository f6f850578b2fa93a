"""Mistakes in a train step that make compression useless or wrong, each with a remedy."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynamiq_jax._buckets import scopes
from dynamiq_jax._core.text import format_bytes, listed
from dynamiq_jax._inputs.shards import names_of
from dynamiq_jax._inspection.collectives import CompiledCollective
from dynamiq_jax._inspection.flow import NO_FLOW, Flow, SentLeaf
from dynamiq_jax._plan.recording import TracedCollective
from dynamiq_jax._rewriting.report import CompressReport

_FEW = 0.05  # share of the bytes below which an exact sum does not matter
_MANY = 0.2  # share of the bytes of small leaves from which on they matter
_SMALL = 2**12  # bytes: losses, norms and metrics


class Argument(NamedTuple):
    """Array that a train step is called with."""

    path: str
    shape: tuple[int, ...]
    split_over: tuple[str, ...]  # axes of the mesh, of more than one device


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Facts about a train step. A text alone shows its collectives."""

    collectives: tuple[CompiledCollective, ...] = ()
    records: tuple[TracedCollective, ...] = ()  # of collectives of this library
    steps: tuple[CompressReport, ...] = ()  # sums of steps that `dq.compress` made
    arguments: tuple[Argument, ...] = ()
    flow: Flow = NO_FLOW  # of the sums of the records
    workers: tuple[str, ...] = ()  # axes of workers, as a user says; empty if not said


class Finding(NamedTuple):
    """Mistake in a train step."""

    kind: str  # such as "double reduction"
    text: str  # what is wrong, and what to do


def findings(known: Evidence) -> list[Finding]:
    """Return the mistakes that show in a program, each once."""
    rules = (
        _one_worker,
        _double_reduction,
        _not_compressed,
        _whole_gradient,
        _below_threshold,
        _fast_link,
        _thrown_away,
        _sent_repeatedly,
        _added_by_optimizer,
    )
    of_rules = itertools.chain.from_iterable(rule(known) for rule in rules)
    return list(dict.fromkeys(of_rules))


def _one_worker(known: Evidence) -> Iterator[Finding]:
    for record in known.records:
        if record.plan.collective.axes.slow.size == 1:
            yield Finding(
                "one worker",
                f"Axis {record.axes[0]!r} has one worker, so that nothing is compressed. Give the "
                "axis over which workers have different gradients, or a mesh with more devices "
                "along this one.",
            )


def _double_reduction(known: Evidence) -> Iterator[Finding]:
    for one, (record, names) in _summed_twice(known).items():
        yield Finding(
            "double reduction",
            f"{_what(one)} sums arrays of the sizes of {listed(names)}, which are "
            f"also summed over {_spelled(record.axes)}, compressed. Take the exact sum away"
            f"{_by_autodiff(one)}.",
        )


def _summed_twice(known: Evidence) -> dict[CompiledCollective, tuple[TracedCollective, list[str]]]:
    """Return exact sums of arrays with the sizes of compressed leaves, and the names of leaves."""
    summed_twice = {}
    for record in known.records:
        names = {
            record.plan.parts[index].size: record.plan.names[index] or "the tree"
            for bucket in record.plan.buckets
            for index in bucket.leaves
        }
        for one in known.collectives:
            over_workers = (
                _is_between_workers(one, known)
                if one.axes is None
                else set(one.axes) & set(record.axes)
            )
            is_other_sum = one.is_floating_sum and not one.labels and over_workers
            if is_other_sum and (alike := [names[size] for size in one.sizes if size in names]):
                summed_twice[one] = record, alike
    return summed_twice


def _not_compressed(known: Evidence) -> Iterator[Finding]:
    labeled = [one for one in known.collectives if one.labels]
    others = [one for one in known.collectives if one.is_floating_sum and not one.labels]
    if labeled:
        least = max(_FEW * sum(one.bytes for one in labeled), _SMALL)
        groups = {one.groups for one in labeled if scopes.FAST not in one.labels}
        twice = _summed_twice(known)
        found = [one for one in others if one.groups in groups and one not in twice]
        remedy = (
            ", over the same axis as compressed gradients. If these are gradients, give them to "
            "the same call"
        )
    elif not any(record.plan.collective.axes.slow.size == 1 for record in known.records):
        least = _SMALL
        over_workers = [one for one in others if _is_between_workers(one, known)]
        found = sorted(over_workers, key=lambda one: -one.bytes)[:3]
        remedy = (
            ": nothing in this program is compressed. Wrap the step in dq.compress, or average "
            "gradients by dq.pmean inside jax.shard_map"
        )
    else:
        return
    for one in found:
        if one.bytes > least:
            text = f"{_what(one)} is exact{remedy}{_by_autodiff(one)}."
            yield Finding("not compressed", text)


def _whole_gradient(known: Evidence) -> Iterator[Finding]:
    for record in known.records:
        compressed = {i for bucket in record.plan.buckets for i in bucket.leaves}
        specs = record.plan.shards.specs
        whole = (i for i in sorted(compressed) if not any(map(names_of, specs[i])))
        for index in whole:
            name, shape = record.plan.names[index], record.plan.parts[index].shape
            alike = [a for a in known.arguments if a.shape == shape]
            over = [set(argument.split_over) - set(record.axes) for argument in alike]
            if over and all(over):  # such arguments are split, but the gradient is not
                axes = sorted(set.union(*over))
                yield Finding(
                    "whole gradient",
                    f"Every device compresses and sends all of leaf {name or 'tree'}, of shape "
                    f"{shape}, although {alike[0].path} is split over {_spelled(tuple(axes))}. "
                    "Give dq.Compression(specs=), so that each device sends its own shard; inside "
                    "a shard_map over these axes, scatter the gradient first.",
                )
                break


def _below_threshold(known: Evidence) -> Iterator[Finding]:
    for record in known.records:
        if record.plan.collective.axes.slow.size == 1:
            continue
        small = [
            (record.plan.names[index], why, sent)
            for (index, why), sent in zip(record.plan.exact, record.exact_bytes, strict=True)
            if "exact_below" in why or "too few" in why
        ]
        whole = sum(bucket.bytes_sent for bucket in record.plan.buckets) + sum(record.exact_bytes)
        sent = sum(sent for *_, sent in small)
        if small and sent > _MANY * whole:
            name, why, _ = max(small, key=lambda leaf: leaf[-1])
            yield Finding(
                "below the threshold",
                f"{len(small)} of {len(record.plan.names)} leaves over {_spelled(record.axes)} are "
                f"summed exactly, {sent / whole:.0%} of the bytes: {name or 'tree'}, for example, "
                f"since {why}. Give dq.Compression(exact_below=0), or join small leaves.",
            )


def _is_between_workers(one: CompiledCollective, known: Evidence) -> bool:
    """Return whether a collective may be over an axis of workers.

    Axes of workers are those that a user says, or those of recorded collectives. In a text without
    records, workers are the devices that exchange compressed bytes. Without any, every axis may be
    one.
    """
    if known.workers and one.axes is not None:
        return bool(set(one.axes) & set(known.workers))
    if known.records and one.axes is not None:
        return any(set(one.axes) & set(record.axes) for record in known.records)
    compressed = {each.groups for each in known.collectives if each.labels}
    if not compressed:
        return True
    for groups in compressed:
        group_of = {device: number for number, group in enumerate(groups) for device in group}
        for members in one.groups:
            groups_of_members = [group_of[device] for device in members if device in group_of]
            if len(set(groups_of_members)) < len(groups_of_members):
                return True
    return False


def _fast_link(known: Evidence) -> Iterator[Finding]:
    for record in known.records:
        over_axis = [
            one
            for one in known.collectives
            if one.labels and one.axes == record.axes[:1] and scopes.EXACT not in one.labels
        ]
        sent = sum(one.bytes for one in over_axis)
        # Some messages of a butterfly stay inside of a host on any axis.
        is_inside = all(one.link == "inside a host" for one in over_axis)
        if sent and is_inside and record.plan.buckets:
            yield Finding(
                "fast link",
                f"Axis {record.axes[0]!r} is inside a host, where links are fast, and "
                f"{format_bytes(sent)} are compressed over it. Encoding takes longer than it "
                "saves. Sum over it exactly by jax.lax.pmean, or give the slow axis first, as in "
                "axis_name=('hosts', 'local').",
            )


def _thrown_away(known: Evidence) -> Iterator[Finding]:
    """Yield findings of sums that are zeros, and of sums that nothing uses."""
    sent = {origin: _bytes_of(one, known) for origin, one in known.flow.sent.items()}
    zeros = [origin for origin, one in known.flow.sent.items() if one.is_zero]
    unused = [origin for origin in known.flow.unused if origin not in zeros]
    for found, why in (
        (zeros, "constant zeros, as gradients of frozen parameters are"),
        (unused, "not used after their sum, as gradients of frozen parameters are"),
    ):
        wasted = sum(sent[origin] for origin in found)
        if wasted > max(_FEW * sum(sent.values()), _SMALL):
            yield Finding(
                "sent and thrown away",
                f"{_leaves([known.flow.sent[origin] for origin in sorted(found)], known)} "
                f"{'is' if len(found) == 1 else 'are'} {why}: {format_bytes(wasted)} of "
                f"{format_bytes(sum(sent.values()))} in a step. Sum the others alone: "
                "differentiate with respect to the trained parameters, or wrap "
                "dq.all_reduce_gradients in optax.masked(..., trained).",
            )


def _sent_repeatedly(known: Evidence) -> Iterator[Finding]:
    """Yield a finding for each number of times that leaves are sent to be added up only."""
    by_count: dict[int, list[list[SentLeaf]]] = {}
    for group in known.flow.together:
        members = [known.flow.sent[origin] for origin in sorted(group)]
        if (count := sum(one.added for one in members)) > 1:
            by_count.setdefault(count, []).append(members)
    for count, groups in by_count.items():
        sent = sum(_bytes_of(one, known) for members in groups for one in members)
        needed = sum(
            max(_bytes_of(one, known) / one.added for one in members) for members in groups
        )
        if sent - needed > _SMALL:
            yield Finding(
                "sent repeatedly",
                f"{_leaves([members[0] for members in groups], known)} "
                f"{'is' if len(groups) == 1 else 'are'} sent {count} times, and the results are "
                f"only added up: {format_bytes(sent)} in a step, of which {format_bytes(needed)} "
                "are needed. Add up the gradients of each worker, and sum once behind the loop.",
            )


def _added_by_optimizer(known: Evidence) -> Iterator[Finding]:
    if not any(".acc_grads" in argument.path for argument in known.arguments):
        return
    sent = sum(one.bytes for one in known.collectives if one.labels and not one.in_branch)
    if sent > _SMALL:
        yield Finding(
            "sent repeatedly",
            f"optax.MultiSteps adds up what each small step has summed, {format_bytes(sent)} in "
            "each of them. Take a step of all small batches together, which adds up the "
            "gradients of each worker in a jax.lax.scan, and sum once behind it.",
        )


def _bytes_of(one: SentLeaf, known: Evidence) -> float:
    """Return the bytes that each device sends for a leaf in a step."""
    record = known.records[one.record]
    for (index, _), sent in zip(record.plan.exact, record.exact_bytes, strict=True):
        if index == one.leaf:
            return one.times * sent
    shares = [
        record.plan.bytes_by_leaf(bucket, bucket.bytes_sent).get(one.leaf, 0)
        for bucket in record.plan.buckets
    ]
    return one.times * sum(shares)


def _leaves(sent: Sequence[SentLeaf], known: Evidence) -> str:
    """Return the names of some leaves, and the axes of the first."""
    names = [known.records[one.record].plan.names[one.leaf] or "tree" for one in sent]
    kind = "Leaf" if len(names) == 1 else "Leaves"
    return f"{kind} {listed(names)} over {_spelled(known.records[sent[0].record].axes)}"


def _what(one: CompiledCollective) -> str:
    place = f" at {one.place}" if one.place else ""
    axes = "" if one.axes is None else f" over {_spelled(one.axes)}"
    return f"The {one.opcode}{place} of {format_bytes(one.bytes)} in {'+'.join(one.dtypes)}{axes}"


def _by_autodiff(one: CompiledCollective) -> str:
    if "transpose(" not in one.source:
        return ""
    return (
        ". It comes from jax.grad with respect to parameters that are the same on all workers: "
        "dq.compress of the step compresses it. Inside jax.shard_map, you may also mark them "
        "before jax.grad, params = jax.lax.pcast(params, axis_name, to='varying')"
    )


def _spelled(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)
