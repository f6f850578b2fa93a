"""Devices of a program: the axes of its mesh, and the hosts they are in."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

# Way of the bytes of a collective: each from its source to its target, straight to all members of
# the group, or around a ring of the group.
Route = Literal["pairs", "direct", "ring"]


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices in the order in which a program numbers them."""

    axes: Mapping[str, int]  # of the mesh, with their sizes, slowest first; empty if not known
    hosts: tuple[int, ...] | None  # of every device; None if not known

    @staticmethod
    def of(mesh: Any, devices_per_host: int | None = None) -> "Devices":
        """Return the devices of a mesh.

        Args:
          mesh: `jax.sharding.Mesh`, or a mapping of axis names to sizes.
          devices_per_host: devices that share a host, in the order of their ids. None: by their
            processes. CPU devices of one process are then in no host: they simulate some.
        """
        sizes = dict(mesh.shape if hasattr(mesh, "shape") else mesh)
        count = math.prod(sizes.values())
        known = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
        if devices_per_host is not None:
            ids = [device.id for device in known] or range(count)
            return Devices(sizes, tuple(index // devices_per_host for index in ids))
        if not known:
            known = jax.devices() if len(jax.devices()) == count else []
        processes = tuple(device.process_index for device in known)
        is_simulated = len(set(processes)) <= 1 and all(d.platform == "cpu" for d in known)
        return Devices(sizes, None if is_simulated else processes)

    def axes_of(self, groups: np.ndarray) -> tuple[str, ...] | None:
        """Return the axes along which members of a group differ; None if the mesh is not known.

        Args:
          groups: numbers of devices, [groups, members].
        """
        if not self.axes or groups.max() >= math.prod(self.axes.values()):
            return None
        places = np.stack(np.unravel_index(groups, tuple(self.axes.values())), axis=-1)
        differ = (places != places[:, :1]).any(axis=(0, 1))
        return tuple(name for name, d in zip(self.axes, differ, strict=True) if d)

    def link(self, groups: np.ndarray) -> str:
        """Return the slowest kind of link between members of a group."""
        sent = self.sent_by_hosts(groups, "ring")
        if sent is None:
            return "unknown"
        return "between hosts" if any(sent) else "inside a host"

    def sent_by_hosts(self, groups: np.ndarray, route: Route) -> tuple[float, ...] | None:
        """Return the bytes that each host sends to others; None if hosts are not known.

        The unit is what each device sends in all. A ring passes through the devices of a host one
        after the other, so that it leaves each host once.

        Args:
          groups: numbers of devices, [groups, members], or pairs of sources and targets.
        """
        if self.hosts is None or groups.max() >= len(self.hosts):
            return None
        _, numbers = np.unique(self.hosts, return_inverse=True)
        hosts, count, size = numbers[groups], numbers.max() + 1, groups.shape[1]
        if route == "pairs":
            senders, leaving = hosts[:, 0], hosts[:, 0] != hosts[:, 1]
        else:
            in_group = np.arange(len(groups))[:, None] * count + hosts
            parts, members = np.unique(in_group, return_counts=True)
            senders, others = parts % count, size - members
            leaving = others > 0 if route == "ring" else members * others / max(size - 1, 1)
        return tuple(np.bincount(senders, leaving, minlength=count).tolist())
