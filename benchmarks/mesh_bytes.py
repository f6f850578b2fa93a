"""Bytes that each device sends over each axis of a mesh, in an optimized HLO program."""

import collections
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from benchmarks.hlo_costs import Instruction, Program

# Of the bytes of a result, the share that one of `size` devices sends.
_SHARES = {
    "collective-permute": lambda size: 1.0,
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "all-gather": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "reduce-scatter": lambda size: size - 1.0,  # the result is a part
}


def sent_by_axes(hlo: str, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Count the bytes that each device sends, the whole program long.

    All branches of a conditional count.

    Args:
      hlo: text of an optimized program.
      mesh: its mesh, whose devices are numbered in order.

    Returns:
      Axes along which members of a group differ, in the order of the mesh, to bytes.
    """
    program = Program(hlo)

    def count(name: str) -> collections.Counter[tuple[str, ...]]:
        total: collections.Counter[tuple[str, ...]] = collections.Counter()
        for line in program.computations[name].values():
            share = _SHARES.get(line.opcode.removesuffix("-start"))
            if share is not None:
                groups = np.array(_groups(line.attributes))
                total[_axes(groups, mesh)] += share(groups.shape[1]) * line.bytes
            if line.opcode == "while":
                inside = count(line.called("body"))
                trips = line.attribute(r'known_trip_count":\{"n":"(\d+)"')
                assert trips or not inside, line.name
                total.update({axes: int(trips) * size for axes, size in inside.items()})
            for called in _called(line):
                total.update(count(called))
        return total

    return dict(count(program.entry))


def _called(line: Instruction) -> Iterator[str]:
    """Yield the computations that a line calls once."""
    if line.opcode == "call":
        yield line.called("to_apply")
    if line.opcode == "conditional":
        yield from re.findall(r"[\w.\-]+", line.attribute(r"branch_computations=\{([^}]*)\}") or "")
        for role in ("true_computation", "false_computation"):
            yield from filter(None, [line.called(role)])


def _groups(attributes: str) -> list[list[int]]:
    """Return the devices of every group of a collective; those of a permutation are pairs."""
    if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", attributes):
        groups = re.findall(r"\{([\d,]*)\}", listed[1])
        return [[int(device) for device in group.split(",")] for group in groups]
    named = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? "
        r"\{([^}]*)\}",
        attributes,
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
        assert ":" not in grouped, attributes  # parts of axes
        last = [list(sizes).index(name.strip().strip("'")) for name in grouped.split(",")]
        others = [axis for axis in range(len(sizes)) if axis not in last]
        size = math.prod(devices.shape[axis] for axis in last)
        return devices.transpose(*others, *last).reshape(-1, size).tolist()
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    assert iota is not None, attributes
    shape = [int(size) for size in iota[3].split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    if iota[4]:
        devices = devices.transpose([int(d) for d in iota[4].split(",")])
    return devices.reshape(int(iota[1]), int(iota[2])).tolist()


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which members of a group differ."""
    places = np.stack(np.unravel_index(groups, mesh.devices.shape), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)
