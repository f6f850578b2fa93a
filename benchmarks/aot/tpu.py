"""Checks with the compiler for TPUs, but no TPU: cycles, memory traffic and compile time of a
compressed `psum`, beside those of exact and BF16 sums.

    python -m benchmarks.aot.tpu

One bucket is summed in one slice and in two: exactly, as BF16, by the kernels for TPUs on rings and
as an all-to-all, and by the base without kernels. With two slices, a ring goes through all chips,
or sums are exact inside a slice and compressed between them, which is also compiled for 4 and 32
times the size, in default buckets and in striped ones. Of every program:

- seconds of a core that the compiler takes;
- cycles: of kernels those of the schedule that the compiler fixes (`tpu_schedule`), with every
  branch taken, and of all else its own estimates. Not counted: waits for memory, and gathers,
  scatters, sorts and collectives, for which it has no estimate; nor a copy of the result, which no
  training step needs;
- ms: these cycles at the clock of the generation. Google publishes no clocks: they follow from the
  published peak of BF16 products and the multipliers of a chip;
- these ms over the time that the bytes take on links of 3.1 and 6.25 GB/s a chip;
- bytes a coordinate: read and written by all instructions of a device, with loops counted as often
  as they run. A kernel is charged the rows that it fetches, not all of its operand. Much of it may
  be in vector memory; "far" is the part that is not.

It needs libtpu, the compiler, of the version that JAX names: pip install -e '.[cli,tpu-aot]'.
"""

import dataclasses
import functools
import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.aot import tpu_kernels, tpu_schedule
from benchmarks.aot import tpu_programs as tpu
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.speed import hlo_costs
from benchmarks.speed.hlo_costs import InstructionCost

# Published peak of BF16 products of a chip, and products of a cycle: cores x units x side^2.
# https://cloud.google.com/tpu/docs/v5e, /v5p and /v6e. Those pages give v6e two units of 256 x 256,
# which would need 3.5 GHz: it is taken for twice as many products, the clock of the one before.
_PEAKS = {
    "v5e": (197e12, 1 * 4 * 128**2),
    "v5p": (459e12, 2 * 4 * 128**2),
    "v6e": (918e12, 1 * 4 * 256**2),
}


@dataclasses.dataclass(frozen=True)
class SumProgram:
    """A program that sums one bucket."""

    name: str
    method: Any  # object or name of a method; None: XLA's own sum
    topology: str = "ring"
    dtype: str = "float32"
    in_slices: bool = False  # exactly inside slices, compressed between them
    times: int = 1  # size of the bucket, over that of the options; large ones are several buckets
    options: dq.Compression | None = None


KERNELS = "dynamiq:5"
ONE_SLICE = (
    SumProgram("exact", None),
    SumProgram("BF16", "bf16"),
    SumProgram("kernels, ring", KERNELS),
    SumProgram("kernels, ring, BF16 rows", KERNELS, dtype="bfloat16"),
    SumProgram("kernels, all-to-all", KERNELS, topology="all_to_all"),
)
LINKS = (3.1, 6.25)  # GB/s of a chip
BASE = SumProgram("base, ring", dq.DynamiQ(bits=5.0, implementation="xla"))
TWO_SLICES = (
    SumProgram("exact", None),
    SumProgram("BF16", "bf16"),
    SumProgram("kernels, ring", KERNELS),
    SumProgram("kernels between slices", KERNELS, in_slices=True),
)
BETWEEN = SumProgram("kernels between slices", KERNELS, in_slices=True)
LARGE = (
    dataclasses.replace(BETWEEN, times=4),
    dataclasses.replace(BETWEEN, times=32),
    dataclasses.replace(
        BETWEEN,
        name="kernels between slices, striped",
        times=32,
        options=dq.Compression(bucketing="striped"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: int = 2**23  # coordinates of the bucket
    topologies: tuple[str, ...] = ("v5e:2x4", "v5p:2x2x2", "v6e:2x4")  # of a slice
    base: tuple[str, ...] = ("v5e:2x4",)  # topologies for which the base is compiled, too
    large: tuple[str, ...] = ("v5e:2x4",)  # topologies for which larger sums are compiled, too
    heaviest: int = 8  # instructions of each program to keep, those that take most cycles
    save: bool = True  # write the result to benchmarks/results/aot_tpu.json


@benchmark("aot_tpu")
def main(config: Config) -> Report:
    """Compile all programs."""
    with tempfile.TemporaryDirectory() as folder:
        tpu_schedule.write_schedules(Path(folder))
        tpu.prepare()
        results = {name: examine_topology(config, name, Path(folder)) for name in config.topologies}
    versions = {"libtpu": importlib.metadata.version("libtpu")}
    return Report(
        results=versions | results,
        shown=[
            shown
            for topology, result in results.items()
            for shown in (
                kernel_table(topology, result["kernels"]),
                program_table(topology, result["programs"]),
            )
        ],
    )


def clock_mhz(topology: str) -> int:
    """Return the clock of a generation in MHz."""
    peak, multipliers = _PEAKS[topology.partition(":")[0]]
    return round(peak / (2 * multipliers) / 1e6)


def examine_topology(config: Config, topology: str, schedules: Path) -> dict[str, Any]:
    """Compile all kernels and programs for slices of one kind."""
    chips = tpu.mesh(topology, 1, {"data": -1}).size
    programs = []
    for slices, sums in ((1, ONE_SLICE), (2, TWO_SLICES)):
        if slices == 1 and topology in config.base:
            sums = (*sums, BASE)
        if slices == 2 and topology in config.large:
            sums = (*sums, *LARGE)
        for one in sums:
            axes = {"data": slices * chips}
            if one.in_slices:
                axes = {"slices": slices, "chips": chips}
            programs.append(examine(config, topology, slices, axes, one, schedules))
    return {
        "clock_mhz": clock_mhz(topology),
        "kernels": {
            dtype: examine_kernels(topology, config.size, chips, dtype, schedules)
            for dtype in ("float32", "bfloat16")
        },
        "programs": programs,
    }


@functools.cache
def examine_kernels(
    topology: str, size: int, num_chunks: int, dtype: str, schedules: Path
) -> dict[str, dict[str, Any]]:
    """Compile the kernels of an all-reduce, each on its own."""
    device = tpu.one_device(topology)
    return {
        what: tpu_kernels.examine(kernel, device, schedules) | {"name": kernel.name}
        for what, kernel in tpu_kernels.kernels(size, num_chunks, dtype).items()
    }


def examine(
    config: Config,
    topology: str,
    slices: int,
    axes: dict[str, int],
    one: SumProgram,
    schedules: Path,
) -> dict[str, Any]:
    """Compile one sum: a column of the table."""
    names = tuple(axes) if len(axes) > 1 else next(iter(axes))

    def total(values, key_data):
        if one.method is None:
            return lax.psum(values, names)
        key = jax.random.wrap_key_data(key_data)
        return dq.psum(values, names, key=key, method=_compression(one))

    mesh, size = tpu.mesh(topology, slices, axes), config.size * one.times
    program = tpu.compile_for(
        mesh,
        total,
        [
            (jax.ShapeDtypeStruct((mesh.size * size,), one.dtype), PartitionSpec(names)),
            (jax.ShapeDtypeStruct((2,), "uint32"), PartitionSpec()),
        ],
        PartitionSpec(),
    )
    runs = _without_copy_of_result(hlo_costs.CostProgram(program.text))
    workers = next(iter(axes.values()))
    kernels = {run: name for run in runs if (name := _kernel_of(run))}
    # Of each bucket, all of which are alike, the part that the kernels of a chip handle.
    buckets = sum(run.times for run, name in kernels.items() if name == "statistics") or 1
    part = size * workers // mesh.size // buckets
    of_kernels = {}
    if kernels:
        found = examine_kernels(topology, part, workers, one.dtype, schedules).values()
        of_kernels = {kernel["name"]: kernel["cycles"] for kernel in found}
    kernel_cycles = sum(of_kernels[name] * run.times for run, name in kernels.items())
    other_cycles = sum(hlo_costs.cycles(run.instruction) * run.times for run in runs)
    rows_bytes = part * jax.numpy.dtype(one.dtype).itemsize
    spared = sum(_not_fetched(run, rows_bytes, workers) for run in kernels)
    rows_far = (run for run in kernels if run.far_bytes >= rows_bytes)
    spared_far = sum(_not_fetched(run, rows_bytes, workers) for run in rows_far)
    memory = program.executable.memory_analysis()
    heaviest = sorted(runs, key=lambda run: -hlo_costs.cycles(run.instruction) * run.times)

    ms = (kernel_cycles + other_cycles) / clock_mhz(topology) / 1e3
    sent = _sent(one, size, axes)

    def a_coordinate(count: float) -> float:
        return round(count / size, 2)

    return {
        "sum": one.name,
        "size": size,
        "buckets": buckets,
        "slices": slices,
        "axes": axes,
        "trace_seconds": round(program.trace_seconds, 2),
        "compile_seconds": round(program.compile_seconds, 2),
        "compile_cpu_seconds": round(program.compile_cpu_seconds, 2),
        "kernel_cycles": kernel_cycles,
        "other_cycles": other_cycles,
        "ms": round(ms, 3),
        "share_of_transfer": {
            str(link): round(ms / (sent / link / 1e6), 3) for link in LINKS if one.method
        },
        "instructions": sum(run.times for run in runs),
        "bytes_per_coordinate": a_coordinate(sum(run.total for run in runs) - spared),
        "far_bytes_per_coordinate": a_coordinate(
            sum(run.far_bytes * run.times for run in runs) - spared_far
        ),
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "collectives": hlo_costs.collectives(runs),
        "heaviest": [
            {
                "type": run.instruction.type,
                "source": run.instruction.source,
                "times": run.times,
                "cycles": hlo_costs.cycles(run.instruction) * run.times,
            }
            for run in heaviest[: config.heaviest]
        ],
    }


def _without_copy_of_result(program: hlo_costs.CostProgram) -> list[InstructionCost]:
    """Return what a sum runs inside a training step, which uses the result and returns no copy."""
    of_entry = program.computations[program.entry].values()
    copies = {i.name for i in of_entry if i.is_root and i.opcode == "copy"}
    return [run for run in program.runs() if run.instruction.name not in copies]


def _sent(one: SumProgram, size: int, axes: dict[str, int]) -> int:
    """Return the bytes that a chip sends over the slow axis."""
    report = dq.wire_report(
        jax.ShapeDtypeStruct((size,), one.dtype),
        tuple(axes.values()) if len(axes) > 1 else next(iter(axes.values())),
        method=_compression(one),
    )
    return report.bytes_per_worker


def _compression(one: SumProgram) -> dq.Compression:
    options = one.options or dq.Compression()
    return dataclasses.replace(options, method=one.method or "exact", topology=one.topology)


def kernel_table(topology: str, kernels: dict[str, dict[str, Any]]) -> Table:
    """Return the table of all kernels."""
    columns = [Column("kernel", lambda what: what)]
    columns += [
        Column(dtype, lambda what, of=of: of[what]["cycles_per_coordinate"], "{:.4f}")
        for dtype, of in kernels.items()
    ]
    title = f"Kernels for {topology}: cycles a coordinate, by rows"
    return table(title, columns, list(kernels["float32"]))


def program_table(topology: str, programs: list[dict[str, Any]]) -> Table:
    """Return the table of all programs, one a row."""
    columns = (
        Column("sum", "sum"),
        Column("slices", "slices"),
        Column("Mi", lambda program: program["size"] / 2**20, "{:g}"),
        Column("compile, s of a core", "compile_cpu_seconds", "{:.1f}"),
        Column("kernels, k cycles", lambda program: program["kernel_cycles"] / 1e3, "{:.0f}"),
        Column("all else", lambda program: program["other_cycles"] / 1e3, "{:.0f}"),
        Column("ms", "ms", "{:.2f}"),
        Column("bytes a coordinate", "bytes_per_coordinate", "{:.1f}"),
        Column("far", "far_bytes_per_coordinate", "{:.1f}"),
    )
    return table(f"Sums of one bucket, compiled for {topology}", columns, programs)


def _kernel_of(run: InstructionCost) -> str | None:
    """Return the name of the kernel that an instruction runs."""
    *_, name, last = ["", *run.instruction.source.split("/")]
    return name if run.instruction.opcode == "custom-call" and last == "pallas_call" else None


def _not_fetched(run: InstructionCost, rows_bytes: int, chunks: int) -> float:
    """Return the bytes of rows that a kernel takes as an operand, but never fetches."""
    if _kernel_of(run) in ("statistics", "decompress") or run.operand_bytes < rows_bytes:
        return 0
    return rows_bytes * (1 - 1 / chunks) * run.times


if __name__ == "__main__":
    run(main, __doc__)
