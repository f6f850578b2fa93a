"""Compile time and temporary memory of training steps of large models, which are never allocated.

    python -m benchmarks.training.big_models

Every program is compiled for virtual CPU devices, in a process of its own, so that none finds a
cache warm. Seconds are those of a core. Temporary memory is that of one device, as the compiler
plans it.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.progress import track

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from benchmarks.harness.timing import timed
from benchmarks.training.big_models import decoder, dense

Case = decoder.Case | dense.Case | dense.Buckets


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    repeats: int = 3  # processes for each program; the median counts
    save: bool = True  # write the result to benchmarks/results/big_models.json


def cases() -> dict[str, tuple[Case, int]]:
    """Return programs by name, and the virtual devices of each."""
    known: dict[str, tuple[Case, int]] = {}
    for form in decoder.FORMS:
        known[f"8 B, {form}"] = decoder.Case(form, 32, (2, 8)), 16
    known["8 B, compress, 4 layers"] = decoder.Case("compress", 4, (2, 8)), 16
    for form in ("compress", "pmean in a map"):
        name = f"8 B on 256 devices, {form}, lowered alone"
        known[name] = decoder.Case(form, 32, (16, 16)), 256
    for count in (8, 32, 64):
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
    lowered, seconds = timed(case.lower, time.process_time)
    row: dict[str, Any] = {"lower_seconds": seconds}
    if "lowered alone" not in name:
        compiled, compile_seconds = timed(lowered.compile, time.process_time)
        memory = compiled.memory_analysis()
        row["seconds"] = seconds + compile_seconds
        row["temporary_bytes"] = memory.temp_size_in_bytes
        row["result_bytes"] = memory.output_size_in_bytes
    return row


def gigabytes(name: str) -> Callable[[dict[str, Any]], float | None]:
    """Return a function of a row: a size in GB; None if the program was not compiled."""
    return lambda row: row[name] / 1e9 if name in row else None


COLUMNS = (
    Column("program", "name"),
    Column("lower", "lower_seconds", "{:.1f} s"),
    Column("lower and compile", lambda row: row.get("seconds"), "{:.1f} s"),
    Column("temporary GB", gigabytes("temporary_bytes"), "{:.2f}"),
    Column("result GB", gigabytes("result_bytes"), "{:.2f}"),
)


@benchmark("big_models")
def main(config: Config) -> Report:
    """Compile all programs."""
    rows = []
    for name in track(cases(), description="Compiling", transient=True):
        runs = [in_process(measure, name) for _ in range(config.repeats)]
        middle = sorted(runs, key=lambda row: row.get("seconds", row["lower_seconds"]))
        rows.append({"name": name} | middle[len(middle) // 2])
    caption = "CPU seconds; memory of a device"
    return Report(
        results=rows,
        shown=[table("Programs of large models", COLUMNS, rows, caption)],
        options=files.options_of(config, but=("save",)),
    )


if __name__ == "__main__":
    run(main, __doc__)
