"""`dynamiq-jax doctor`: collectives of a train step, and mistakes in it."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro

from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import parse_bytes
from dynamiq_jax._inspection import scripts
from dynamiq_jax._inspection.collectives import MOST_DEVICES
from dynamiq_jax._inspection.findings import Evidence, Finding
from dynamiq_jax._inspection.hlo import is_whole
from dynamiq_jax._inspection.inspection import Inspection
from dynamiq_jax._inspection.step import inspect_text
from pallas_kernels import operations

_LEAST = "4Ki"
_REMEDY = "Write step.lower(...).compile().as_text() to a file, and give that."


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Report what a train step sends, and the mistakes that make compression useless.

    SCRIPT_OR_HLO is a training script, or the text of a compiled program.

    A script runs as it is, until it has compiled its train step, which is then not run. A script in
    which no device sends anything, as on a single device, runs to its end: give --cpu-devices.

      dynamiq-jax doctor train.py -- --batch 32

    A program is what step.lower(...).compile().as_text() returns, or the file that ends in
    after_optimizations.txt which XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text' writes. The
    sizes of leaves are not in it, so that fewer mistakes can be found:

      dynamiq-jax doctor step.hlo --mesh hosts=4 local=8 --devices-per-host 8

    In a program of your own, print(dq.inspect(train_step, params, batch)) says the most. The exit
    status is 1 if there is a mistake.
    """

    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT_OR_HLO")]
    """Python file, or the text of an optimized HLO program."""

    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Command line of the script, after --."""

    mesh: Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS=SIZE")] = ()
    """Axes of the mesh, slowest first, where the program does not say them."""

    workers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="AXIS")] = ()
    """Axes of the mesh whose devices have different gradients, where nothing is compressed yet."""

    devices_per_host: int | None = None
    """Devices that share a host, in the order of their ids. By default, those of one process."""

    cpu_devices: int | None = None
    """Run the script on as many virtual CPU devices, as one that is meant for several GPUs."""

    least: str = _LEAST
    """The first program in which each device sends at least this many bytes is taken as the train
    step."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the table and the mistakes to this file."""

    def run(self) -> int:
        """Print a table of all collectives, and the mistakes; return the exit status."""
        options.check_range("--devices-per-host", self.devices_per_host, 1)
        options.check_range("--cpu-devices", self.cpu_devices, 1)
        options.check_outputs(self.json)
        if not self.target.is_file():
            raise CommandError(
                f"{self.target} is no file. Give a script, or the text of a program."
            )
        meshes = [parse_mesh(self.mesh)] if self.mesh else []
        unknown = [axis for axis in self.workers if not meshes or axis not in meshes[0]]
        if unknown:
            raise CommandError(
                f"--workers: {unknown[0]!r} is no axis of --mesh{': ' if self.mesh else ''}"
                f"{' '.join(self.mesh)}. Give all axes with their sizes, as in --mesh data=4."
            )
        inspection = (
            self._of_script(meshes) if self.target.suffix == ".py" else self._of_text(meshes)
        )
        if jax.process_index() == 0:
            console = tables.console()
            console.out(inspection)
            if self.target.suffix == ".py":  # a text may be of another machine
                console.out(f"By default, {operations.default_backend()}.")
            results = {
                "collectives": [row._asdict() for row in inspection.rows],
                "findings": [finding._asdict() for finding in inspection.findings],
            }
            records.keep(self, jax.devices()[0].device_kind, results)
        return int(bool(inspection.findings))

    def _of_script(self, meshes: Sequence[Mapping[str, int]]) -> Inspection:
        if self.cpu_devices is not None:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", self.cpu_devices)
        least = parse_bytes(self.least, "--least")
        text, traced, mistake = scripts.train_step(self.target, self.arguments, least)
        if mistake is not None:
            return Inspection((), (Finding(mistake.kind, str(mistake)),), is_compiled=False)
        known = Evidence(records=tuple(traced), steps=tuple(traced.steps), workers=self.workers)
        inspection = inspect_text(
            text or "", known, meshes=meshes, devices_per_host=self.devices_per_host
        )
        if text is None and not inspection.findings:
            raise CommandError(
                f"{self.target} ended without a program in which each device sends {self.least}B "
                "or more. Give a smaller --least, more devices (--cpu-devices 4), or the script "
                "that trains."
            )
        return inspection

    def _of_text(self, meshes: Sequence[Mapping[str, int]]) -> Inspection:
        try:
            text = self.target.read_text()
        except UnicodeDecodeError:
            text = ""
        if "HloModule" not in text:
            raise CommandError(
                f"{self.target} is neither a script (.py) nor the text of an HLO program. {_REMEDY}"
            )
        if not is_whole(text):
            raise CommandError(f"{self.target} is cut off. {_REMEDY}")
        if self.cpu_devices is not None:
            raise CommandError("--cpu-devices is for a script: a compiled program has its devices.")
        if self.arguments or self.least != _LEAST:
            raise CommandError(
                "--least and arguments are for a script, and a program does not run."
            )
        if self.devices_per_host is not None and not meshes:
            raise CommandError("--devices-per-host needs --mesh, with all axes of the program.")
        count = re.search(r"num_partitions=(\d+)", text)
        if meshes and count and math.prod(meshes[0].values()) != int(count[1]):
            raise CommandError(
                f"--mesh: {' '.join(self.mesh)} has {math.prod(meshes[0].values())} devices, and "
                f"the program {count[1]}. Give the axes of its mesh."
            )
        known = Evidence(workers=self.workers)
        try:
            return inspect_text(text, known, meshes=meshes, devices_per_host=self.devices_per_host)
        except Exception as error:  # a damaged text ends in any kind
            raise CommandError(f"{self.target} cannot be read: {error!r:.200}. {_REMEDY}") from None


def parse_mesh(texts: tuple[str, ...]) -> dict[str, int]:
    """Parse axes of a mesh, such as "data=4", in their order."""
    sizes = {}
    for text in texts:
        match = re.fullmatch(r"([^=]+)=([1-9]\d*)", text)
        if match is None or match[1] in sizes:
            raise CommandError(f"--mesh: {text!r} is not a new axis with its size, as in data=4.")
        sizes[match[1]] = int(match[2])
    if math.prod(sizes.values()) > MOST_DEVICES:
        raise CommandError(
            f"--mesh: {' '.join(texts)!r} has more than {MOST_DEVICES} devices. Give the sizes "
            "of the axes."
        )
    return sizes
