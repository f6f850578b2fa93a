"""Registers, spills, bytes and instructions of every kernel, compiled for one H200."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from benchmarks.error.plain_tables import print_table
from benchmarks.gpu import h200_model as h200
from pallas_kernels import operations
from pallas_kernels._jax.compat import has_mosaic_gpu

# Rows of a program are no choice of users: coordinates of a thread follow from the backends.
from pallas_kernels._mosaic_gpu.launch import MOST_ROWS
from pallas_kernels._triton.blocks import LaunchConfig
from pallas_kernels.codec import SUPER_GROUP_SIZE, Layout, LocalRows, place_rows

_EXCESS = 1.10  # memory that a kernel may touch, over what it has to
_SHAPE = jax.ShapeDtypeStruct
_NARROW = "widths to 8"  # of hops whose wider rows have no code in the kernel
_BACKENDS = {"triton": "Triton", "mosaic_gpu": "Mosaic GPU"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel: an operation on a gradient of some type, by some method."""

    operation: str
    method: str
    dtype: str
    layout: Layout
    backend: str = "triton"


def cases(dtypes: Sequence[str], size: int, num_chunks: int) -> list[Case]:
    """Return all kernels to compile.

    Args:
      dtypes: of the gradient.
      size: coordinates of the bucket.
      num_chunks: chunks of the bucket.
    """
    default = dq.DynamiQ()
    layout = default.layout(size, num_chunks)
    label = f"{default.bits:g} bits"
    names = ("statistics", "compress", "hop", "decompress_accumulate")
    hops = {"paper": dq.DynamiQ.paper(), _NARROW: dq.DynamiQ(widths=tuple(range(2, 9)))}
    result = []
    for dtype in dtypes:
        result += [Case(name, label, dtype, layout) for name in names]
        for name, method in hops.items():
            result.append(Case("hop", name, dtype, method.layout(size, num_chunks)))
    result.append(Case("decompress", label, "float32", layout))  # whatever was compressed
    if has_mosaic_gpu():
        result += [
            dataclasses.replace(case, backend="mosaic_gpu")
            for case in result
            if case.method in (label, _NARROW)
        ]
    return result


def examine(case: Case, dump: Path) -> dict[str, Any]:
    """Compile one kernel: a row of the table."""
    layout = case.layout
    run = operations.by(case.backend)
    rows = _SHAPE((layout.num_rows, SUPER_GROUP_SIZE), case.dtype)
    norms = _SHAPE((layout.num_rows,), "uint16")
    places = jax.eval_shape(lambda norms: place_rows(norms, layout), norms)
    local, number = LocalRows(rows, places, _SHAPE((2,), "uint32")), _SHAPE((), "int32")
    payload = layout.payload_bytes
    of_chunk = layout.rows_per_chunk * SUPER_GROUP_SIZE
    item, wire = jnp.dtype(case.dtype).itemsize, payload / of_chunk
    # function, arguments, bytes per coordinate that it has to move
    programs: dict[str, tuple[Callable, tuple, float]] = {
        "statistics": (lambda *a: run.statistics(*a), (rows,), item),
        "compress": (
            lambda *a: operations.compress(*a, layout=layout, implementation=case.backend),
            (local, number, number),
            item + wire,
        ),
        "hop": (
            lambda *a: run.hop(*a, layout=layout),
            (_SHAPE((1, payload), "uint8"), local, number, number),
            item + 2 * wire,
        ),
        "decompress_accumulate": (
            lambda *a: run.decompress_accumulate(*a, layout=layout),
            (_SHAPE((1, payload), "uint8"), local, number),
            item + wire + 4,
        ),
        "decompress": (
            lambda *a: run.decompress(*a, layout=layout),
            (_SHAPE((layout.num_chunks, payload), "uint8"), places),
            wire + item,
        ),
    }
    function, args, floor = programs[case.operation]
    program = h200.compile_for(h200.mesh(1, "data"), function, args, dump=dump)
    one_chunk = case.operation in ("compress", "hop", "decompress_accumulate")
    touched = _touched_bytes(program, layout, one_chunk) / (
        of_chunk if one_chunk else of_chunk * layout.num_chunks
    )
    (kernel,) = program.kernels
    by_triton = case.backend == "triton"
    block = LaunchConfig().rows if by_triton else MOST_ROWS
    coordinates = block * SUPER_GROUP_SIZE // kernel.threads  # of a thread
    kind = "st" if case.operation == "decompress" else "ld"
    vector_share = None
    if by_triton:  # Mosaic's have the copy engine move rows
        vector_share = kernel.vector_bytes(kind, 4 * item) / (coordinates * item)
    pipes = kernel.pipes()
    counts = None
    one_branch = max(layout.allocation.widths) <= 8 or case.operation == "statistics"
    if pipes is not None and (by_triton or one_branch):
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


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print two tables for each backend: what its kernels hold and touch, and what they run."""
    for backend, name in _BACKENDS.items():
        of_backend = [row for row in rows if row["backend"] == backend]
        if not of_backend:
            continue
        print_table(
            f"{name} kernels for an H200; bytes a coordinate",
            "registers,spills,shared,warps,barriers,vectors,kernels,bytes,floor",
            [
                [
                    name_of(row),
                    *(
                        str(row[key])
                        for key in ("registers", "spill_bytes", "shared_bytes", "warps")
                    ),
                    "-" if row["barriers"] is None else str(row["barriers"]),
                    "-" if row["vector_share"] is None else f"{row['vector_share']:.0%}",
                    str(row["kernels"]),
                    f"{row['touched_bytes']:.2f}",
                    f"{row['floor_bytes']:.2f}",
                ]
                for row in of_backend
            ],
        )
        counted = [row for row in of_backend if row["instructions"]]
        if counted:
            print_table(
                f"Instructions a coordinate of {name} kernels, by the pipe that runs them",
                "budget,slots,all,FMA,ALU,XU,LSU,other",
                [[name_of(row), *map("{:.1f}".format, _work(row))] for row in counted],
            )


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a kernel in tables and problems."""
    return f"{row['operation']}, {row['method']}, {row['dtype']}"


def _work(row: dict[str, Any]) -> list[float]:
    counts = row["instructions"]
    return [row["budget"], row["slots"], sum(counts.values()), *counts.values()]


def _touched_bytes(program: h200.Program, layout: Layout, one_chunk: bool) -> float:
    """Return the bytes that the instructions of a program read and write, by the shapes of their
    operands and results. A kernel for one chunk reads its part of the rows and of their places.
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
