"""Bytes that each device sends over each axis of a mesh, in a compiled program."""

import collections
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from tests.support.hlo import ITEM_BYTES, KINDS

_HEAD = re.compile(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LOOP = re.compile(r"body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def sent_by_axes(hlo: str, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Axes along which members of a group differ, to the bytes that each device sends there."""
    lines, name, entry = collections.defaultdict(list), "", ""
    for line in hlo.splitlines():
        if opening := _HEAD.match(line):
            name = opening.group(1)
            entry = name if line.lstrip().startswith("ENTRY") else entry
        lines[name].append(line)

    def count(name: str) -> collections.Counter[tuple[str, ...]]:
        total: collections.Counter[tuple[str, ...]] = collections.Counter()
        for line in lines[name]:
            if found := _COLLECTIVE.search(line):
                result, kind, rest = found.groups()
                groups = np.array(_groups(rest))
                size = groups.shape[1]
                share = {
                    "collective-permute": 1.0,
                    "all-reduce": 2 * (size - 1) / size,
                    "reduce-scatter": float(size - 1),  # of the result, which is a part
                }.get(kind, (size - 1) / size)
                total[_axes(groups, mesh)] += share * _bytes(result)
            if loop := _LOOP.search(line):
                if inside := count(loop.group(1)):
                    trips = _TRIPS.search(line)
                    assert trips is not None, line
                    for axes, size in inside.items():
                        total[axes] += int(trips.group(1)) * size
            else:
                for called in _called(line):
                    total += count(called)
        return total

    return dict(count(entry))


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


def _bytes(result: str) -> int:
    return sum(
        ITEM_BYTES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in _ARRAY.findall(result)
    )


def _groups(rest: str) -> list[list[int]]:
    """Devices of every group; those of a permutation are pairs."""
    listed = re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", rest)
    if listed:
        groups = re.findall(r"\{([\d,]*)\}", listed.group(1))
        return [[int(device) for device in group.split(",")] for group in groups]
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([^}]*)\}",
        rest,
    )
    if named:
        axes, order, transposed, grouped = named.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        devices = np.arange(math.prod(sizes.values()))
        if order:
            devices = devices.reshape([int(d) for d in order.split(",")])
        if transposed:
            devices = devices.transpose([int(d) for d in transposed.split(",")])
        devices = devices.reshape(list(sizes.values()))
        assert ":" not in grouped, rest  # parts of axes
        last = [list(sizes).index(name.strip().strip("'")) for name in grouped.split(",")]
        others = [axis for axis in range(len(sizes)) if axis not in last]
        size = math.prod(devices.shape[axis] for axis in last)
        return devices.transpose(*others, *last).reshape(-1, size).tolist()
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    assert iota is not None, rest
    shape = [int(size) for size in iota.group(3).split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    if iota.group(4):
        devices = devices.transpose([int(d) for d in iota.group(4).split(",")])
    return devices.reshape(int(iota.group(1)), int(iota.group(2))).tolist()


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    places = np.stack(np.unravel_index(groups, mesh.devices.shape), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)
