"""The devices: workers along "data", and in each worker its parameters' parts along "fsdp"."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WHOLE_BELOW = 1024  # Elements: cutting a norm's scale would save nothing.
VIRTUAL_DEVICES = 8  # On CPUs, unless told.


def make_mesh(workers: int | None, fsdp: int, processes: int = 1, *, at_least: int = 1) -> Mesh:
    """A mesh of axes "data" and "fsdp", over the accelerators if there are enough, else over
    virtual CPU devices. Comes before anything else of JAX, once all processes have joined.

    Args:
        workers: Size of "data"; None for all devices there are.
        fsdp: Size of "fsdp".
        processes: How many share the mesh.
        at_least: Fewest workers, where `workers` leaves it open.

    Raises:
        ValueError: There are too few devices, or some would be left over.
    """
    virtual = workers * fsdp if workers else max(VIRTUAL_DEVICES, fsdp)
    jax.config.update("jax_num_cpu_devices", max(virtual // processes, 1))
    devices = jax.devices()
    if len(devices) == 1 and (workers or at_least) * fsdp > 1:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    workers = workers or len(devices) // fsdp
    size, total = workers * fsdp, len(devices)
    # A process without a device would wait for the others forever.
    if size > total or size == 0 or (processes > 1 and size < total):
        raise ValueError(
            f"--workers is {workers} and --fsdp is {fsdp}: their product has to be {total}, the "
            f"devices of {processes} process(es), or less with one process. Give other numbers."
        )
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((workers, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices[:size])


def fsdp_specs(tree: Any, mesh: Mesh) -> Any:
    """How arrays are cut over "fsdp": along the longest axis that divides evenly.

    A function of the shape alone, so that an optimizer's moments lie where their parameters do.

    Args:
        tree: A pytree of arrays or of their shapes.
        mesh: Has an axis "fsdp".

    Returns:
        The same tree of `PartitionSpec`.
    """
    parts = mesh.shape["fsdp"]

    def spec(leaf: Any) -> P:
        even = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        if not even or math.prod(leaf.shape) < WHOLE_BELOW:
            return P()
        longest = max(even, key=lambda axis: leaf.shape[axis])
        return P(*[None] * longest, "fsdp")

    return jax.tree.map(spec, tree)


def on_mesh(specs: Any, mesh: Mesh) -> Any:
    """Shardings from a tree of `PartitionSpec`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
