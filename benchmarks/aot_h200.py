"""Checks with the compiler for H200, but no GPU: registers, spills, bytes and instructions of every
kernel, and what a program on several GPUs runs while bytes travel.

Compiles the Triton and Mosaic GPU kernels for one H200, and a compressed `pmean` for several, on a
machine that needs no GPU; and a training step whose gradients are reduced in one bucket, or in
several under the backward pass. Exits with 1 where a figure is off, and says which:

- a kernel spills registers, or an operation takes more than one kernel;
- it touches over 10 % more memory than it must: gradient, message received, message sent;
- one of Triton's does not read or write four neighbouring coordinates of a gradient at once (f32:
  128 bits);
- a hop on several GPUs takes more than one kernel, or, in a bidirectional ring, nothing runs while
  a transfer is under way;
- with several buckets, hardly a byte of gradient travels under a matmul of the backward pass.

Instructions are counted in the machine code, with the branches for widths that a block does not
have; rows "N bits alone" have rows of one width only, so that all that is counted runs. Mosaic's
kernels have code of their own for every width, so of its hops only those are counted. The budget is
how many instructions can be issued while memory moves the bytes of a coordinate, at best clock and
bandwidth; slots are how many it takes, as the busiest pipe may need longer than to issue all.

It needs the CUDA plugin of the same version as JAX and the CUDA compiler, but neither a driver nor
the CUDA libraries: pip install -e '.[bench,cuda13-aot]'.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common, h200
from benchmarks.aot import overlap, pmean
from benchmarks.aot.table import new_table
from dynamiq_jax import compat
from dynamiq_jax.topologies import TOPOLOGIES
from pallas_kernels import implementation, mosaic_gpu_launch, triton_launch
from pallas_kernels.codec.layout import Layout, make_layout
from pallas_kernels.codec.packing import SUPER_GROUP_SIZE
from pallas_kernels.operations import compress, decompress, decompress_accumulate, hop, statistics

_EXCESS = 1.10  # memory that a kernel may touch, over what it has to
_SHAPE = jax.ShapeDtypeStruct
_BACKENDS = {"triton": "Triton", "mosaic_gpu": "Mosaic GPU"}


def _topologies() -> tuple[str, ...]:
    """Those of this version, with the choices that matter here."""
    both = [
        f"{name}:bidirectional"
        for name, topology in TOPOLOGIES.items()
        if "bidirectional" in {field.name for field in dataclasses.fields(topology)}
    ]
    return (*TOPOLOGIES, *both)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the checks."""

    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of the gradient
    alone: tuple[int, ...] = (8, 5, 4)  # widths for which a hop is compiled alone
    size: int = 2**27  # coordinates of the bucket that the kernels work on
    workers: int = 8  # GPUs; also chunks of that bucket
    # of the pmean: names, with options that are to be True after colons, as in ring:bidirectional
    topologies: tuple[str, ...] = dataclasses.field(default_factory=_topologies)
    leaf_sizes: tuple[int, ...] = (2**24, 2**22, 1000)  # coordinates of the leaves of the pmean
    # of the training step, in the same way; "exact" is jax.lax.pmean
    steps: tuple[str, ...] = overlap.TOPOLOGIES
    save: bool = True  # write the result to benchmarks/results/aot_h200.json


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel: an operation on a gradient of some type, by some method."""

    operation: str
    method: str
    dtype: str
    layout: Layout
    backend: str = "triton"


def cases(config: Config) -> list[Case]:
    """All kernels to compile."""
    default = dq.DynamiQ()
    layout = default.layout(config.size, config.workers)
    label = f"{default.bits:g} bits"
    names = ("statistics", "compress", "hop", "decompress_accumulate")
    result = []
    for dtype in config.dtypes:
        result += [Case(name, label, dtype, layout) for name in names]
        for name, method in (("paper", dq.DynamiQ.paper()), ("8 bits", dq.DynamiQ(bits=8.0))):
            result.append(Case("hop", name, dtype, method.layout(config.size, config.workers)))
        for width in config.alone:
            alone = make_layout(
                config.size,
                config.workers,
                fractions=((width, 1.0),),
                group_size=default.group_size,
                spacing=default.spacing,
                gap_ratio=default.gap_ratio,
                rounding=default.rounding,
            )
            result.append(Case("hop", f"{width} bits alone", dtype, alone))
    result.append(Case("decompress", label, "float32", layout))  # whatever was compressed
    if compat.has_mosaic_gpu():
        result += [
            dataclasses.replace(case, backend="mosaic_gpu")
            for case in result
            if case.method == label or case.method.endswith("alone")
        ]
    return result


def examine(case: Case, config: Config, dump: Path) -> dict[str, Any]:
    """Compiles one kernel: a row of the table."""
    layout = case.layout
    options: dict[str, Any] = {"layout": layout, "implementation": case.backend}
    rows = _SHAPE((layout.num_rows, SUPER_GROUP_SIZE), case.dtype)
    order = _SHAPE((layout.num_chunks, layout.rows_per_chunk), "int32")
    number, seed = _SHAPE((), "int32"), _SHAPE((2,), "uint32")
    payload = layout.payload_bytes
    of_chunk = layout.rows_per_chunk * SUPER_GROUP_SIZE
    item, wire = jnp.dtype(case.dtype).itemsize, payload / of_chunk
    # function, arguments, bytes per coordinate that it has to move
    operations: dict[str, tuple[Callable, tuple, float]] = {
        "statistics": (lambda *a: statistics(*a, implementation=case.backend), (rows,), item),
        "compress": (
            lambda *a: compress(*a, **options),
            (rows, order, number, number, seed),
            item + wire,
        ),
        "hop": (
            lambda *a: hop(*a, **options),
            (_SHAPE((1, payload), "uint8"), rows, order, number, number, seed),
            item + 2 * wire,
        ),
        "decompress_accumulate": (
            lambda *a: decompress_accumulate(*a, **options),
            (_SHAPE((1, payload), "uint8"), rows, order, number),
            item + wire + 4,
        ),
        "decompress": (
            lambda *a: decompress(*a, **options),
            (_SHAPE((layout.num_chunks, payload), "uint8"), order),
            wire + item,
        ),
    }
    function, args, floor = operations[case.operation]
    program = h200.compile_for(h200.mesh(1, "data"), function, args, dump=dump)
    one_chunk = case.operation in ("compress", "hop", "decompress_accumulate")
    touched = _touched_bytes(program, layout, one_chunk) / (
        of_chunk if one_chunk else of_chunk * layout.num_chunks
    )
    (kernel,) = program.kernels
    by_triton = case.backend == "triton"
    block = triton_launch.Config().rows if by_triton else mosaic_gpu_launch.MOST_ROWS
    coordinates = block * SUPER_GROUP_SIZE // kernel.threads  # of a thread
    kind = "st" if case.operation == "decompress" else "ld"
    vector_share = None
    if by_triton:  # Mosaic's have the copy engine move rows
        vector_share = kernel.vector_bytes(kind, 4 * item) / (coordinates * item)
    pipes = kernel.pipes()
    counts = None
    one_width = len(layout.classes) == 1 or case.operation == "statistics"
    if pipes is not None and (by_triton or one_width):
        counts = {pipe: count / coordinates for pipe, count in pipes.items()}
    row: dict[str, Any] = {
        "backend": case.backend,
        "operation": case.operation,
        "method": case.method,
        "dtype": case.dtype,
        "kernels": sum(instruction.runs for instruction in program.computations[program.entry]),
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "warps": kernel.warps,
        "barriers": kernel.barriers,
        "vector_share": vector_share,
        "floor_bytes": floor,
        "touched_bytes": touched,
        "budget": floor * h200.instructions_per_byte(),
        "instructions": counts,
        "slots": counts and h200.busiest(counts),
        "opcodes": kernel.opcodes,
    }
    problems = {
        f"spills {kernel.spill_bytes} bytes": kernel.spill_bytes > 0,
        f"takes {row['kernels']} kernels, not 1": row["kernels"] != 1,
        f"touches {touched:.2f} bytes a coordinate where it must {floor:.2f}": (
            not floor <= touched <= _EXCESS * floor
        ),
        f"moves the gradient by less than {32 * item} bits": (
            vector_share is not None and vector_share < 1
        ),
    }
    return row | {"problems": [text for text, wrong in problems.items() if wrong]}


def _touched_bytes(program: h200.Program, layout: Layout, one_chunk: bool) -> float:
    """Bytes that the instructions of a program read and write, by the shapes of what goes in and
    out. A kernel for one chunk reads its part of the rows and of the order.
    """
    entry = program.computations[program.entry]
    shapes = {instruction.name: instruction.shape for instruction in entry}
    of_all_chunks = (f"[{layout.num_rows},", f"[{layout.num_chunks},{layout.rows_per_chunk}]")
    total = 0.0
    for instruction in filter(lambda instruction: instruction.runs, entry):
        total += h200.size_of(instruction.shape)
        for operand in instruction.operands:
            parted = any(shape in shapes[operand] for shape in of_all_chunks)
            part = layout.num_chunks if one_chunk and instruction.pallas and parted else 1
            total += h200.size_of(shapes[operand]) / part
    return total


def kernel_tables(rows: list[dict[str, Any]], name: str) -> list[Table]:
    """Two tables of a backend's kernels: what they hold and touch, and what they run."""
    resources = new_table(
        f"{name} kernels for an H200; bytes a coordinate",
        "registers,spills,shared,warps,barriers,vectors,kernels,bytes,floor",
    )
    work = new_table(
        f"Instructions a coordinate of {name} kernels, by the pipe that runs them",
        "budget,slots,all,FMA,ALU,XU,LSU,other",
    )
    for row in rows:
        style = "red" if row["problems"] else None
        head = _name(row)
        resources.add_row(
            head,
            *(str(row[key]) for key in ("registers", "spill_bytes", "shared_bytes", "warps")),
            "-" if row["barriers"] is None else str(row["barriers"]),
            "-" if row["vector_share"] is None else f"{row['vector_share']:.0%}",
            str(row["kernels"]),
            f"{row['touched_bytes']:.2f}",
            f"{row['floor_bytes']:.2f}",
            style=style,
        )
        counts = row["instructions"]
        if counts:
            numbers = [row["budget"], row["slots"], sum(counts.values()), *counts.values()]
            work.add_row(head, *(f"{number:.1f}" for number in numbers), style=style)
    return [resources, work] if work.rows else [resources]


def _name(row: dict[str, Any]) -> str:
    return f"{row['operation']}, {row['method']}, {row['dtype']}"


def main(config: Config) -> int:
    """Compiles, prints tables and all problems; 1 where there are some."""
    console = Console()
    console.width = max(console.width, 130)  # of the first table
    # Not where the compiler prints what is read from it.
    progress = functools.partial(track, console=Console(stderr=True), transient=True)
    with tempfile.TemporaryDirectory() as folder, implementation.without_gpu("compile"):
        dump = Path(folder)
        h200.prepare(dump)
        kernels = [examine(case, config, dump) for case in progress(cases(config), "kernels")]
        for backend, name in _BACKENDS.items():
            if rows := [row for row in kernels if row["backend"] == backend]:
                console.print(*kernel_tables(rows, name))
        means = [
            pmean.examine(name, config.workers, config.leaf_sizes, dump)
            for name in progress(config.topologies, "pmean")
        ]
        console.print(pmean.table(means, config.workers))
        steps = [
            overlap.examine(case, config.workers, dump)
            for case in progress(overlap.cases(config.steps), "training steps")
        ]
        console.print(overlap.table(steps, config.workers))
    problems = [
        f"{row['backend']} {_name(row)}: {problem}"
        for row in kernels
        for problem in row["problems"]
    ]
    problems += [f"{row['topology']}: {problem}" for row in means for problem in row["problems"]]
    problems += [
        f"training step, {row['topology']}, {row['buckets']} buckets: {problem}"
        for row in steps
        for problem in row["problems"]
    ]
    for problem in problems:
        console.print(f"[red]Off: {problem}")
    if config.save:
        results = {"target": "NVIDIA H200", "kernels": kernels, "pmean": means, "steps": steps}
        path = common.save("aot_h200", dataclasses.asdict(config), results)
        console.print(f"Written to {path}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Config, description=__doc__)))
