"""Options of commands that measure on the devices of this process, or of several."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.options import check_range
from dynamiq_jax._measurement.devices import join

_ADDRESS = re.compile(r".+:\d+")


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """Devices and processes that take part, and the file of results."""

    cpu_devices: int | None = None
    """Use as many virtual CPU devices, even where there are accelerators. By default
    JAX_NUM_CPU_DEVICES, or 8 where there is no accelerator and one process."""

    coordinator: str | None = None
    """Join other processes through this HOST:PORT of process 0. Start the same command in each of
    them with --num-processes and --process-id, or with --coordinator auto alone under Slurm, MPI or
    Kubernetes."""

    num_processes: int | None = None
    """Number of processes to join."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was found, with versions and hardware, to this file."""

    def devices(self, least: int) -> Sequence[jax.Device]:
        """Set JAX up, which has to precede its first use, and return the devices of all processes.

        Raises:
          CommandError: options that contradict each other, or fewer than `least` devices.
        """
        several = self.coordinator is not None
        joining = (self.num_processes, self.process_id)
        if not several and joining != (None, None):
            raise CommandError(
                "--num-processes and --process-id are given, but no --coordinator. Give the "
                "HOST:PORT of process 0."
            )
        if several and self.coordinator != "auto" and None in joining:
            raise CommandError(
                f"--coordinator is {self.coordinator}, but --num-processes is "
                f"{self.num_processes} and --process-id is {self.process_id}: give all three, or "
                "--coordinator auto."
            )
        if several and self.coordinator != "auto" and not _ADDRESS.fullmatch(str(self.coordinator)):
            raise CommandError(
                f"--coordinator is {self.coordinator}: give the HOST:PORT of process 0, or auto."
            )
        check_range("--cpu-devices", self.cpu_devices, 1)
        if self.cpu_devices is not None:
            jax.config.update("jax_platforms", "cpu")
        if self.cpu_devices is not None or jax.config.values["jax_num_cpu_devices"] < 1:
            jax.config.update("jax_num_cpu_devices", self.cpu_devices or (1 if several else 8))
        if several:
            try:
                join(None if self.coordinator == "auto" else self.coordinator, *joining)
            except (ValueError, RuntimeError) as error:
                raise CommandError(f"--coordinator is {self.coordinator}: {error}") from None
        devices = jax.devices()
        if len(devices) < least:
            raise CommandError(
                f"there is one device ({devices[0].device_kind}), and nothing to exchange. Give "
                "--cpu-devices 8 for virtual CPU devices, or join processes with --coordinator."
            )
        return devices
