"""Compile time and temporary memory of training steps of large models, which are never allocated.

    python -m benchmarks.training.big_models

Every program is compiled for virtual CPU devices, in a process of its own, so that none finds a
cache warm. Seconds are those of a core. Temporary memory is that of one device, as the compiler
plans it.
"""

import dataclasses
import json
import subprocess
import sys
import time
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import common
from benchmarks.training.big_models import decoder, dense

Case = decoder.Case | dense.Case | dense.Buckets


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    repeats: int = 3  # processes for each program; the median counts
    save: bool = True  # write the result to benchmarks/results/big_models.json
    one: str = ""  # the name of one program to compile in this process, for internal use


def cases() -> dict[str, tuple[Case, int]]:
    """Return programs by name, and the virtual devices of each."""
    known: dict[str, tuple[Case, int]] = {}
    for form in decoder.FORMS:
        known[f"8 B, {form}"] = decoder.Case(form, 32, (2, 8)), 16
    known["8 B, pcast in the scan, 4 layers"] = decoder.Case("pcast in the scan", 4, (2, 8)), 16
    for form in decoder.FORMS[2:]:
        name = f"8 B on 256 devices, {form}, lowered alone"
        known[name] = decoder.Case(form, 32, (16, 16)), 256
    for count in (1, 8, 32, 64):
        known[f"{count} buckets of 128 MiB"] = dense.Buckets(count), 4
    for count in (8, 32):
        known[f"{count} buckets of 128 MiB in order"] = dense.Buckets(count, "in_order"), 4
    for mesh in dense.MESHES:
        for form in dense.FORMS:
            known[f"dense, {mesh}, {form}"] = dense.Case(mesh, form), 8
    return known


def measure(name: str) -> dict[str, Any]:
    """Lower a program, and compile it unless it is lowered alone."""
    case, devices = cases()[name]
    jax.config.update("jax_num_cpu_devices", devices)
    start = time.process_time()
    lowered = case.lower()
    row: dict[str, Any] = {"lower_seconds": time.process_time() - start}
    if "lowered alone" not in name:
        memory = lowered.compile().memory_analysis()
        row["seconds"] = time.process_time() - start
        row["temporary_bytes"] = memory.temp_size_in_bytes
        row["result_bytes"] = memory.output_size_in_bytes
    return row


def main(config: Config) -> None:
    """Compile all programs, print a table and write the result."""
    if config.one:
        print(json.dumps(measure(config.one)))
        return
    console = Console()
    rows = []
    for name in track(cases(), description="Compiling", console=console, transient=True):
        runs = [_in_process(name) for _ in range(config.repeats)]
        middle = sorted(runs, key=lambda row: row.get("seconds", row["lower_seconds"]))
        rows.append({"name": name} | middle[len(middle) // 2])
    console.print(_table(rows))
    if config.save:
        options = {"repeats": config.repeats}
        console.print(f"Wrote {common.save('big_models', options, rows)}")


def _in_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.training.big_models", "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Programs of large models", caption="CPU seconds; memory of a device")
    table.add_column("program")
    for heading in ("lower", "lower and compile", "temporary GB", "result GB"):
        table.add_column(heading, justify="right")
    for row in rows:
        sizes = [row.get(key) for key in ("temporary_bytes", "result_bytes")]
        table.add_row(
            row["name"],
            f"{row['lower_seconds']:.1f} s",
            f"{row['seconds']:.1f} s" if "seconds" in row else "",
            *("" if size is None else f"{size / 1e9:.2f}" for size in sizes),
        )
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
