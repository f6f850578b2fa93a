"""Devices of the workers, and their mesh."""

import platform
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.options import check_least
from dynamiq_jax._measurement.joining import join, on_all_processes

AXIS = "workers"


def worker_devices(
    *,
    cpu_devices: int | None = None,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    least: int = 2,
) -> Sequence[jax.Device]:
    """Set JAX up for a measurement, which has to precede its first use.

    Args:
      cpu_devices: number of virtual CPU devices to use, even where there are accelerators.
      coordinator: HOST:PORT of process 0 of those to join, or "auto".
      num_processes: number of processes to join.
      process_id: index of this process.
      least: number of devices that the measurement needs, 1 or 2.

    Returns:
      Devices of all processes, `least` or more.

    Raises:
      CommandError: options that contradict each other, or too few devices.
    """
    several = coordinator is not None
    joining = (num_processes, process_id)
    if not several and joining != (None, None):
        raise CommandError(
            "--num-processes and --process-id are given, but no --coordinator. Give the HOST:PORT "
            "of process 0."
        )
    if several and coordinator != "auto" and None in joining:
        raise CommandError(
            f"--coordinator is {coordinator}, but --num-processes is {num_processes} and "
            f"--process-id is {process_id}: give all three, or --coordinator auto."
        )
    if cpu_devices is not None:
        check_least("--cpu-devices", cpu_devices, 1)
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", cpu_devices or (1 if several else 8))
    if several:
        try:
            join(None if coordinator == "auto" else coordinator, num_processes, process_id)
        except (ValueError, RuntimeError) as error:
            raise CommandError(f"--coordinator is {coordinator}: {error}") from None
    devices = jax.devices()
    if len(devices) < least:
        raise CommandError(
            f"there is one device ({devices[0].device_kind}), and nothing to exchange. Give "
            "--cpu-devices 8 for virtual CPU devices, or join processes with --coordinator."
        )
    return devices


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
