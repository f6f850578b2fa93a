"""Device mesh: workers along "data", and the parts of each worker's parameters along "fsdp"."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WHOLE_BELOW = 1024  # elements: to cut the weight of a norm would save nothing
VIRTUAL_DEVICES = 8  # on CPUs, unless --workers is given

START_TIMEOUT = 300  # seconds until all processes have to have joined
HEARTBEAT_TIMEOUT = 30  # seconds without a heartbeat, after which JAX ends all processes
SHUTDOWN_TIMEOUT = 10  # seconds that a process waits for the others before it exits


def join_processes(coordinator: str, num_processes: int, process_id: int) -> None:
    """Join the processes of a run through `jax.distributed`.

    A collective has no time-out of its own. If a process hangs, heartbeats stop, and JAX ends the
    others instead of letting them wait forever.

    Args:
      coordinator: HOST:PORT of process 0.
      num_processes: number of processes.
      process_id: rank of this one, from 0.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=START_TIMEOUT,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
    )


def make_mesh(workers: int | None, fsdp: int, processes: int = 1, *, at_least: int = 1) -> Mesh:
    """Make a mesh with axes "data" and "fsdp".

    It spans the accelerators if there are enough, otherwise virtual CPU devices. Call this before
    any other function of JAX, but after `join_processes`.

    Args:
      workers: size of "data"; None for as many as there are devices.
      fsdp: size of "fsdp".
      processes: number of processes that share the mesh.
      at_least: smallest size of "data" if `workers` is None.

    Raises:
      ValueError: there are too few devices, or some would be left over.
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
            f"--workers is {workers} and --fsdp is {fsdp}. Their product has to be {total}, the "
            f"number of devices of {processes} process(es), or less with one process. Give other "
            "numbers."
        )
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((workers, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices[:size])


def fsdp_specs(tree: Any, mesh: Mesh) -> Any:
    """Choose how arrays are cut over "fsdp": along the longest axis that divides evenly.

    The choice depends on the shape alone, so that an optimizer's moments are cut like their
    parameters.

    Args:
      tree: pytree of arrays or of their shapes.
      mesh: mesh with an axis "fsdp".

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
    """Return the shardings of a tree of `PartitionSpec`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, P)
    )
