"""Collectives of a compiled program: over which axes, in which type, and how many bytes."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from dynamiq_jax._buckets.scopes import labels
from dynamiq_jax._inspection.devices import Devices, Route
from dynamiq_jax._inspection.hlo import (
    ArrayType,
    HloComputation,
    HloInstruction,
    HloProgram,
    SourcePlaces,
    arrays_of,
    parts_of,
)

# Bytes that one of `size` devices sends for each byte of its result, and their way. Rings are those
# of NCCL, and of gloo for large arrays.
_TRAFFIC: dict[str, tuple[Callable[[int], float], Route]] = {
    "collective-permute": (lambda size: 1.0, "pairs"),
    "collective-broadcast": (lambda size: 1.0, "ring"),
    "all-reduce": (lambda size: 2 * (size - 1) / size, "ring"),
    "all-gather": (lambda size: (size - 1) / size, "ring"),
    "all-to-all": (lambda size: (size - 1) / size, "direct"),
    "ragged-all-to-all": (lambda size: (size - 1) / size, "direct"),
    "reduce-scatter": (lambda size: size - 1.0, "ring"),  # the result is a part
}
MOST_DEVICES = 2**20  # above all machines: a list of more would fill the memory


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Collective of a program, and what all of its executions in one step send."""

    opcode: str
    arrays: tuple[ArrayType, ...]  # of the result
    groups: tuple[tuple[int, ...], ...]  # devices that exchange something, by their numbers
    axes: tuple[str, ...] | None  # along which members of a group differ; None if not known
    link: str  # "inside a host", "between hosts" or "unknown"
    times: int  # that it runs, with loops of an unknown number of turns counted as one
    in_branch: bool  # whether it is in a branch, and may not run at all
    bytes: float  # that each device sends in all executions
    bytes_of_hosts: tuple[float, ...] | None  # that each host sends to others; None if not known
    labels: tuple[str, ...]  # of this library: what it is part of; empty for others
    source: str  # name that JAX gave the operation
    place: str  # line of the program outside of this library; empty if not known

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the arrays, each once."""
        return tuple(dict.fromkeys(array.dtype for array in self.arrays))

    @property
    def is_floating_sum(self) -> bool:
        """True if it adds floating-point numbers."""
        adds = self.opcode in ("all-reduce", "reduce-scatter")
        return adds and any(dtype.startswith(("f", "bf")) for dtype in self.dtypes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each array that each device puts in."""
        factor = len(self.groups[0]) if self.opcode == "reduce-scatter" else 1
        return tuple(array.size * factor for array in self.arrays)


def collectives_of(text: str, devices: Devices) -> list[CompiledCollective]:
    """Return the collectives of a program, in the order in which they are scheduled.

    The compiler combines small ones: they are listed one by one, and the first counts as run.

    Args:
      text: text of an optimized program; empty for none.
    """
    program, places = HloProgram(text), SourcePlaces(text)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    count = math.prod(map(int, counts))

    def inside(name: str, times: int, in_branch: bool) -> Iterator[CompiledCollective]:
        computation = program.computations[name]
        for line in computation.values():
            opcode = line.opcode.removesuffix("-start")
            if opcode in _TRAFFIC:
                groups, (sent_of, route) = groups_of(line, count), _TRAFFIC[opcode]
                of_hosts = devices.sent_by_hosts(groups, route)
                for number, (arrays, origin) in enumerate(_parts(line, computation)):
                    result = sum(array.bytes for array in arrays)
                    sent = sent_of(groups.shape[1]) * result * times
                    yield CompiledCollective(
                        opcode=opcode,
                        arrays=tuple(arrays),
                        groups=connected(groups),
                        axes=devices.axes_of(groups),
                        link=devices.link(groups),
                        times=0 if number else times,
                        in_branch=in_branch,
                        bytes=sent,
                        bytes_of_hosts=of_hosts and tuple(sent * share for share in of_hosts),
                        labels=labels(origin.source),
                        source=origin.source,
                        place=places.of(origin),
                    )
            elif line.opcode == "while":
                turns = program.trips(name, line)
                again = times if turns is None else times * turns
                yield from inside(line.called("body"), again, in_branch)
            elif line.opcode in ("call", "async-start", "conditional"):
                for callee in line.callees:
                    yield from inside(callee, times, in_branch or line.opcode == "conditional")

    return list(inside(program.entry, 1, False)) if program.entry else []


def _parts(
    line: HloInstruction, computation: HloComputation
) -> list[tuple[list[ArrayType], HloInstruction]]:
    """Return the results of a collective by their origin, with a line that has its metadata."""
    arrays = line.arrays
    if line.opcode.endswith("-start") and not line.opcode.startswith("all-reduce"):
        # The type lists the operands first, then the results, then what the compiler needs.
        arrays = arrays_of(parts_of(line.type)[1])
    names = {line.name} | {
        other.name
        for other in computation.values()
        if other.opcode.endswith("-done") and line.name in other.operands
    }
    users = {
        int(other.attribute(r"index=(\d+)")): other
        for other in computation.values()
        if other.opcode == "get-tuple-element" and names & set(other.operands)
    }
    parts: dict[tuple[tuple[str, ...], str], tuple[list[ArrayType], HloInstruction]] = {}
    for index, array in enumerate(arrays):
        user = users.get(index, line)
        origin = user if len(arrays) > 1 and user.source else line
        key = labels(origin.source), origin.attribute(r"stack_frame_id=(\d+)")
        parts.setdefault(key, ([], origin))[0].append(array)
    return list(parts.values())


def groups_of(line: HloInstruction, count: int) -> np.ndarray:
    """Return the devices of every group of a collective: [groups, members].

    Groups of a permutation are pairs.

    Args:
      count: number of all devices, which are one group where none is named.
    """
    attributes = line.attributes
    if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", attributes):
        groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,]*)\}", listed[1])]
        return np.array(groups, np.int64)
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([^}]*)\}",
        attributes,
    )
    if named:
        return _of_named_axes(*named.groups())
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota is None:
        return _numbered(str(count))[None]
    return _numbered(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))


def _numbered(shape: str, order: str | None = None) -> np.ndarray:
    """Return the numbers of devices from 0 on, of a shape, with dimensions in another order."""
    sizes = [int(size) for size in shape.split(",")]
    count = math.prod(sizes)
    if not 0 < count <= MOST_DEVICES:
        raise ValueError(f"a collective of {count} devices")
    devices = np.arange(count).reshape(sizes)
    return devices.transpose([int(d) for d in order.split(",")]) if order else devices


def connected(groups: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Join groups with common members, as pairs along a ring have: sorted, each once."""
    part_of: dict[int, set[int]] = {}
    for group in groups.tolist():
        # Smaller parts go into the largest: each device moves few times.
        parts = sorted({id(p): p for d in group if (p := part_of.get(d))}.values(), key=len)
        joined = parts.pop() if parts else set()
        joined.update(group, *parts)
        for device in itertools.chain(group, *parts):
            part_of[device] = joined
    parts_once = {id(part): part for part in part_of.values()}.values()
    return tuple(sorted(tuple(sorted(part)) for part in parts_once))


def _of_named_axes(axes: str, shape: str, order: str, grouped: str) -> np.ndarray:
    """Return the groups of devices along axes of a mesh, or parts of axes: `'a':(2)4` is the middle
    dimension of `a`, split into [2, 4, rest].
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    devices = _numbered(shape or str(math.prod(sizes.values())), order)
    along = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
    parts = {name: (int(outer), int(part)) for name, outer, part in along if part}
    split: list[int] = []
    places: dict[str, int] = {}
    for name, size in sizes.items():
        outer, part = parts.get(name, (1, size))
        places[name] = len(split) + 1
        split += [outer, part, size // (outer * part)]
    last = [places[name] for name, _, _ in along]
    others = [axis for axis in range(len(split)) if axis not in last]
    count = math.prod(split[axis] for axis in last)
    return devices.reshape(split).transpose(*others, *last).reshape(-1, count)
