"""Checks with the compiler for TPU v5e, but no TPU: compile time, bytes and relayouts of a
compressed `psum`, beside an exact one.

    python -m benchmarks.aot.tpu

One bucket is summed by a ring of all devices of a slice, by a ring through two slices, and exactly
inside two slices and compressed between them. The compressed ring is compiled twice: as a process
with TPUs does, and as one on a CPU, which takes smaller blocks of rows. Of every program:

- seconds: of the compiler, which uses several threads, and of all of these together;
- bytes a coordinate: read and written by all instructions of a device, with loops counted as often
  as they run, slices and updates in place by their own size, and arrays without padding. Much of
  it may be in vector memory, which the compiler gives to whole arrays where they fit: "far" is the
  part that is not. `cost_analysis`, which counts the body of a loop once, is beside it;
- relayouts: instructions that copy, transpose or reshape an array of at least 1 KiB and compute
  nothing, in the text of the program;
- ms: the compiler's estimate of the time of fusions, at the clock of a v5e. It has none for
  gathers, scatters, sorts and collectives.

It needs libtpu, the compiler, of the version that JAX names: pip install -e '.[cli,tpu-aot]'.
"""

import dataclasses
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common
from benchmarks.aot import tpu_programs as tpu
from benchmarks.speed import hlo_costs

CLOCK_MHZ = 940
_SMALL = 1024  # bytes: of a relayout that does not count


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: int = 2**23  # coordinates of the bucket, float32
    topology: str = "v5e:2x4"  # of a slice
    method: str = "dynamiq:5"  # that compresses
    slices: tuple[int, ...] = (1, 2)  # numbers of slices to compile for
    exact: bool = True  # compile the exact sums too
    heaviest: int = 12  # instructions of each program to keep, those that touch most bytes
    save: bool = True  # write the result to benchmarks/results/aot_tpu.json


def main(config: Config) -> None:
    """Compile all programs and print a table of them."""
    tpu.prepare()
    console = Console()
    once = loops_counted_once(config.topology)
    rows = []
    for slices in config.slices:
        chips = tpu.mesh(config.topology, slices, {"data": -1}).size // slices
        ring = {"data": slices * chips}
        if config.exact:
            rows.append(examine(config, slices, ring, exact=True))
        rows += [examine(config, slices, ring, host=host) for host in ("tpu", "cpu")]
        if slices > 1:
            rows.append(examine(config, slices, {"slices": slices, "chips": chips}))
    console.print(table(rows, once))
    if config.save:
        results = {
            "target": f"TPU {config.topology}",
            "libtpu": importlib.metadata.version("libtpu"),
            "cost_analysis_counts_loop_bodies": "once" if once else "by trip count",
            "programs": rows,
        }
        path = common.save("aot_tpu", dataclasses.asdict(config), results)
        console.print(f"Written to {path}")


def loops_counted_once(topology: str) -> bool:
    """Return whether `cost_analysis` gives the same bytes for 4 and for 16 turns of a loop."""

    def compiled(turns: int) -> float:
        def step(turn, values):
            return jnp.roll(jnp.cumsum(values * turn), 3)

        return tpu.compile_for(
            tpu.mesh(topology, 1, {"data": -1}),
            lambda values: lax.fori_loop(0, turns, step, values),
            [(jax.ShapeDtypeStruct((2**20,), "float32"), PartitionSpec("data"))],
            PartitionSpec("data"),
        ).executable.cost_analysis()["bytes accessed"]

    return compiled(4) == compiled(16)


def examine(
    config: Config, slices: int, axes: dict[str, int], *, exact: bool = False, host: str = "tpu"
) -> dict[str, Any]:
    """Compile one sum as on some host: a row of the table."""
    names = tuple(axes) if len(axes) > 1 else next(iter(axes))

    def total(values, key_data):
        if exact:
            return lax.psum(values, names)
        key = jax.random.wrap_key_data(key_data)
        return dq.psum(values, names, key=key, method=config.method)

    mesh = tpu.mesh(config.topology, slices, axes)
    program = tpu.compile_for(
        mesh,
        total,
        [
            (jax.ShapeDtypeStruct((mesh.size * config.size,), "float32"), PartitionSpec(names)),
            (jax.ShapeDtypeStruct((2,), "uint32"), PartitionSpec()),
        ],
        PartitionSpec(),
        host,
    )
    runs = hlo_costs.Program(program.executable.as_text()).runs()
    memory = program.executable.memory_analysis()
    moves = [run for run in runs if run.moves and run.instruction.bytes >= _SMALL]
    heaviest = sorted(runs, key=lambda run: -run.total)[: config.heaviest]

    def a_coordinate(count: float) -> float:
        return round(count / config.size, 2)

    return {
        "sum": "exact" if exact else config.method,
        "slices": slices,
        "axes": axes,
        "host": host,
        "trace_seconds": round(program.trace_seconds, 2),
        "compile_seconds": round(program.compile_seconds, 2),
        "compile_cpu_seconds": round(program.compile_cpu_seconds, 2),
        "bytes_per_coordinate": a_coordinate(sum(run.total for run in runs)),
        "far_bytes_per_coordinate": a_coordinate(sum(run.far_bytes * run.times for run in runs)),
        "bytes_per_coordinate_loops_once": a_coordinate(sum(run.bytes for run in runs)),
        "cost_analysis_bytes_per_coordinate": a_coordinate(
            program.executable.cost_analysis()["bytes accessed"]
        ),
        "relayouts": len(moves),
        "relayout_bytes_per_coordinate": a_coordinate(sum(run.total for run in moves)),
        "estimated_ms": round(
            sum(hlo_costs.cycles(run.instruction) * run.times for run in runs) / CLOCK_MHZ / 1e3, 3
        ),
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "collectives": hlo_costs.collectives(runs),
        "heaviest": [
            {
                "opcode": run.instruction.opcode,
                "type": run.instruction.type,
                "source": run.instruction.source,
                "times": run.times,
                "bytes_per_coordinate": a_coordinate(run.total),
                "relayout": run.moves,
            }
            for run in heaviest
        ],
    }


def table(rows: list[dict[str, Any]], once: bool) -> Table:
    """Return the table of all programs, one a column."""
    result = Table("", title="Sum of one bucket, compiled for TPU")
    for row in rows:
        axes = " x ".join(f"{size} {name}" for name, size in row["axes"].items())
        result.add_column(f"{row['sum']}\n{axes}", justify="right")
    turns = "loops once" if once else "loops by trip count"
    for heading, cell in {
        "slices": "{slices}",
        "compiled as on": "{host}",
        "compile, s": "{compile_seconds:.1f}",
        "compile, s of a core": "{compile_cpu_seconds:.1f}",
        "bytes a coordinate": "{bytes_per_coordinate:.1f}",
        "far": "{far_bytes_per_coordinate:.1f}",
        f"cost_analysis, {turns}": "{cost_analysis_bytes_per_coordinate:.1f}",
        "relayouts": "{relayouts}",
        "bytes a coordinate of these": "{relayout_bytes_per_coordinate:.1f}",
        "ms": "{estimated_ms:.2f}",
        "temporary, MB": "{temporary_megabytes:.1f}",
    }.items():
        megabytes = [row["temporary_bytes"] / 1e6 for row in rows]
        cells = (
            cell.format(**row, temporary_megabytes=size)
            for row, size in zip(rows, megabytes, strict=True)
        )
        result.add_row(heading, *cells)
    for name in sorted({name for row in rows for name in row["collectives"]}):
        sizes = (row["collectives"].get(name, {"bytes": 0})["bytes"] for row in rows)
        result.add_row(f"{name}, MB", *(f"{size / 1e6:.2f}" for size in sizes))
    return result


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
