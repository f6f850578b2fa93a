"""Sections `main`, `bits`, `sizes` and `sweep`: the time of every operation of every backend, and
of the hop with other programs.
"""

import functools
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.cases import GpuCase
from benchmarks.gpu.jobs import floor_bytes
from benchmarks.gpu.record import Results
from benchmarks.gpu.report import Row, add_ratios, make_row, matching, print_rows, print_title

# Rows of a program and its warps are no choice of users: the sweep takes the backend itself.
from pallas_kernels._triton import Triton
from pallas_kernels._triton.blocks import LaunchConfig

_HOP = ("hop", "triton")


def measure(
    bench: GpuBench, results: Results, *, sizes: Sequence[int], bits: Sequence[float]
) -> None:
    """Time all operations for all dtypes at sizes and bits."""
    results["rows"] = rows = []
    print_title()
    for size in sizes:
        for one_bits in bits:
            for dtype in bench.options.dtypes:
                label = f"{size} {dtype} {one_bits:g} bits"
                if bench.record.may_start(label):
                    with bench.record.case(label):
                        rows += _measure(bench, GpuCase(bench, size, dtype, one_bits))
                    bench.record.write()


def sweep(bench: GpuBench, results: Results) -> None:
    """Time the hop for all rows of a block and warps, at the size and bits that matter most."""
    options = bench.options
    for dtype in options.dtypes:
        if not bench.record.may_start(f"sweep {dtype}"):
            continue
        with bench.record.case(f"sweep {dtype}"):
            rows = results[dtype] = _sweep(
                bench, GpuCase(bench, options.sizes[0], dtype, options.bits[0])
            )
            best = min(rows, key=lambda row: row["us"], default=None)
            for row in rows:
                print(
                    f"{dtype:>9} rows {row['rows']:>2} warps {row['warps']}: {row['us']:9.1f} us, "
                    f"{row['fraction_of_copy']:.3f} of copy" + (" <- best" if row is best else "")
                )


def _measure(bench: GpuBench, case: GpuCase) -> list[Row]:
    """Return the rows of a case, except those that are known, as bits do not change them."""
    bench.compile_all(case.programs(case.jobs))
    sets = case.make_inputs()
    known = {row["key"] for row in bench.rows}
    rows: list[Row] = []
    for job in case.jobs:
        key = case.key(job)
        if str(key) in known:
            continue
        timing = bench.measure(key, case.arg_sets(job, sets))
        if timing is None:
            continue
        moved = floor_bytes(*job, case.layout, case.dtype)
        copy = bench.copy_bytes_per_second
        rows.append(make_row(key, timing, input_sets=len(sets), moved=moved, copy=copy))
    bench.rows += rows
    add_ratios(rows, among=bench.rows)
    # The alternatives once; elsewhere they are the ratios.
    first = (case.size, case.bits) == (bench.options.sizes[0], bench.options.bits[0])
    print_rows(rows if first else matching(rows, implementation="triton"))
    return rows


def _sweep(bench: GpuBench, case: GpuCase) -> list[dict[str, Any]]:
    options = bench.options
    keys = {
        LaunchConfig(rows=rows, warps=warps): (
            "sweep",
            rows,
            warps,
            case.size,
            case.dtype,
            case.bits,
        )
        for rows in options.sweep_rows
        for warps in options.sweep_warps
    }
    # What the inputs are made with.
    programs = case.programs(
        [("statistics", "xla"), ("places", "xla"), ("compress", "xla"), ("compress", "triton")]
    )
    shapes = case.arguments(_HOP, case.shapes)
    for config, key in keys.items():
        programs[key] = functools.partial(Triton(config).hop, layout=case.layout), shapes
    bench.compile_all(programs)
    arg_sets = case.arg_sets(_HOP, case.make_inputs())
    moved = floor_bytes(*_HOP, case.layout, case.dtype) * case.size
    timed = []
    for config, key in keys.items():
        timing = bench.measure(key, arg_sets)
        if timing is not None:
            fraction = moved / timing["us"] * 1e6 / bench.copy_bytes_per_second
            timed.append(config._asdict() | timing | {"fraction_of_copy": fraction})
    return timed
