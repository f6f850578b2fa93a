"""Section `sweep`: the hop for all rows of a block and warps."""

import dataclasses
import functools
from typing import Any

from pallas_kernels.hop.triton import hop
from pallas_kernels.triton_launch import Config

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.record import Results
from benchmarks.gpu.traffic import floor_bytes

_HOP = ("hop", "triton")


def sweep(bench: Bench, results: Results) -> None:
    """All dtypes, at the size and bits that matter most."""
    options = bench.options
    for dtype in options.dtypes:
        if not bench.record.may_start(f"sweep {dtype}"):
            continue
        with bench.record.case(f"sweep {dtype}"):
            found = results[dtype] = _sweep(
                bench, Case(bench, options.sizes[0], dtype, options.bits[0])
            )
            best = min(found, key=lambda row: row["us"], default=None)
            for row in found:
                print(
                    f"{dtype:>9} rows {row['rows']:>2} warps {row['warps']}: {row['us']:9.1f} us, "
                    f"{row['fraction_of_copy']:.3f} of copy" + (" <- best" if row is best else "")
                )


def _sweep(bench: Bench, case: Case) -> list[dict[str, Any]]:
    options = bench.options
    keys = {
        Config(rows=rows, warps=warps): ("sweep", rows, warps, case.size, case.dtype, case.bits)
        for rows in options.sweep_rows
        for warps in options.sweep_warps
    }
    # What the inputs are made with.
    programs = case.programs(
        [("statistics", "xla"), ("order", "xla"), ("compress", "xla"), ("compress", "triton")]
    )
    shapes = case.arguments(_HOP, case.shapes)
    for config, key in keys.items():
        programs[key] = functools.partial(hop, layout=case.layout, config=config), shapes
    bench.compile_all(programs)
    arg_sets = case.arg_sets(_HOP, case.make_inputs())
    moved = floor_bytes(*_HOP, case.layout, case.dtype) * case.size
    found = []
    for config, key in keys.items():
        timing = bench.measure(key, arg_sets)
        if timing is not None:
            fraction = moved / timing["us"] * 1e6 / bench.copy_bytes_per_second
            found.append(dataclasses.asdict(config) | timing | {"fraction_of_copy": fraction})
    return found
