"""Devices of the workers, their mesh, and the processes that have them.

Processes join each other through `jax.distributed`, with time-outs. A process that dies closes its
connections, and gloo raises in those that talk to it, at once. One that hangs, or whose link
stalls, misses heartbeats; then JAX aborts all processes (SIGABRT), also those inside a collective,
which has no time-out of its own.
"""

import platform
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from numpy.typing import NDArray

AXIS = "workers"
START_TIMEOUT = 300  # seconds until all processes have to be there
HEARTBEAT_TIMEOUT = 30  # seconds without a sign of life: the others end
SHUTDOWN_TIMEOUT = 10  # seconds that a process which ends waits for the others


def join(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Join the other processes.

    JAX aborts this one (SIGABRT) if they have not come after `START_TIMEOUT`. Without the HOST:PORT
    of process 0, `jax.distributed` finds out everything under Slurm, MPI or Kubernetes.

    Raises:
      ValueError, RuntimeError: arguments are missing, or JAX has computed something before.
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


def barrier() -> None:
    """Wait until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("dynamiq_jax._measurement")


def on_all_processes(values: Sequence[float], dtype: Any) -> NDArray[Any]:
    """Gather as many numbers from each process, [processes, len(values)]."""
    local = np.asarray(values, dtype)
    return np.asarray(multihost_utils.process_allgather(local)).reshape(-1, local.size)


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Make devices the workers of one axis."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def workers_per_machine(mesh: Mesh) -> int:
    """Return the largest number of workers that share the cores of one machine.

    It is 1 where each worker has a device of its own.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return 1
    name = zlib.crc32(platform.node().encode())
    here = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
    machines, workers = on_all_processes([name, here], np.uint32).T
    return int(max(workers[machines == machine].sum() for machine in machines))
