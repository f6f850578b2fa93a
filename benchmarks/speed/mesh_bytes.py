"""Bytes that each device sends over each axis of a mesh, in an optimized HLO program."""

import collections

from jax.sharding import Mesh

from dynamiq_jax._inspection.collectives import collectives_of
from dynamiq_jax._inspection.devices import Devices


def sent_by_axes(hlo: str, mesh: Mesh) -> dict[tuple[str, ...], float]:
    """Count the bytes that each device sends, the whole program long.

    All branches of a conditional count.

    Args:
      hlo: text of an optimized program.
      mesh: its mesh, whose devices are numbered in order.

    Returns:
      Axes along which members of a group differ, in the order of the mesh, to bytes.
    """
    total: collections.Counter[tuple[str, ...]] = collections.Counter()
    for one in collectives_of(hlo, Devices.of(mesh)):
        total[one.axes or ()] += one.bytes
    return dict(total)
