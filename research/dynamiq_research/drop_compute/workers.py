"""Groups of devices that each have one host loop, and arrays that go to them and back."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax.parts import check_integer

P = PartitionSpec
LOCAL = "devices_of_worker"  # axis of the mesh of one worker


@dataclasses.dataclass(frozen=True)
class Workers:
    """Workers of a mesh, each a group of devices of one process."""

    mesh: Mesh
    names: tuple[str, ...]  # axes of the mesh, all of them, slowest first
    devices_per_worker: int | None  # None for all devices of a process

    def __post_init__(self):
        if not self.names or set(self.names) != set(self.mesh.axis_names):
            raise ValueError(
                f"axis_name={self.names!r} are not all axes of the mesh, which are "
                f"{self.mesh.axis_names}. Give all: every device holds whole parameters."
            )
        counts = [len(devices) for devices in self._of_processes]
        if len(counts) != jax.process_count() or len(set(counts)) > 1:
            raise ValueError(
                f"mesh has {counts} devices of {jax.process_count()} processes. Give a mesh with "
                "as many devices of every process."
            )
        if self.devices_per_worker is not None:
            check_integer("devices_per_worker", self.devices_per_worker, 1)
            if counts[0] % self.devices_per_worker:
                raise ValueError(
                    f"devices_per_worker={self.devices_per_worker} does not divide the {counts[0]} "
                    "devices of a process. Give a divisor of it."
                )

    @functools.cached_property
    def local(self) -> tuple[Mesh, ...]:
        """Meshes of the workers of this process, with the one axis `LOCAL`."""
        own = self._of_processes[jax.process_index()]
        return tuple(
            Mesh(np.array(own[at : at + self.size]), (LOCAL,))
            for at in range(0, len(own), self.size)
        )

    @property
    def size(self) -> int:
        """Devices of a worker."""
        return self.devices_per_worker or len(self._of_processes[0])

    @property
    def first(self) -> int:
        """Index of the first worker of this process among all."""
        return jax.process_index() * len(self.local)

    @property
    def rows_spec(self) -> PartitionSpec:
        """Specification of arrays with a leading axis of devices."""
        return P(self.names)

    def view(self, tree: Any, mesh: Mesh) -> Any:
        """Return replicated arrays as they are on the devices of one worker, without a copy."""

        def of_worker(leaf: Array) -> Array:
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            return jax.make_array_from_single_device_arrays(
                leaf.shape, NamedSharding(mesh, P()), [shards[d] for d in mesh.devices.flat]
            )

        return jax.tree.map(of_worker, tree)

    def joined(self, trees: list[Any]) -> Any:
        """Join arrays of each local worker, [its devices, ...], to global ones, without a copy."""

        def join(*leaves: Array) -> Array:
            shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards]
            shape = (self.mesh.size, *leaves[0].shape[1:])
            sharding = NamedSharding(self.mesh, self.rows_spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, shards)

        return jax.tree.map(join, *trees)

    def rows(self, micro_batch: Any, number: int) -> Any:
        """Place the rows of one local worker on its devices; scalars go whole to each."""
        mesh = self.local[number]

        def place(path: Any, leaf: Any) -> Array:
            leaf = leaf if hasattr(leaf, "ndim") else np.asarray(leaf)
            if leaf.ndim == 0:
                return jax.device_put(leaf, NamedSharding(mesh, P()))
            devices = self.size * len(self.local)
            if leaf.shape[0] % devices:
                raise ValueError(
                    f"micro_batches[...]{jax.tree_util.keystr(path)} has shape {leaf.shape}, whose "
                    f"leading axis does not divide by the {devices} devices of this process. Give "
                    "as many rows to each."
                )
            rows = leaf.shape[0] // len(self.local)
            own = leaf if len(self.local) == 1 else leaf[number * rows : (number + 1) * rows]
            return jax.device_put(own, NamedSharding(mesh, P(LOCAL)))

        return jax.tree_util.tree_map_with_path(place, micro_batch)

    @functools.cached_property
    def _of_processes(self) -> list[list[Any]]:
        """Devices of the mesh by process, in the order of the axes."""
        order = [self.mesh.axis_names.index(name) for name in self.names]
        devices: dict[int, list[Any]] = {}
        for device in np.transpose(self.mesh.devices, order).flat:
            devices.setdefault(device.process_index, []).append(device)
        return [devices[process] for process in sorted(devices)]
