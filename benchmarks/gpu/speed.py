"""Sections `main`, `bits` and `sizes`: the time of every operation of every backend."""

from collections.abc import Sequence

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.record import Results
from benchmarks.gpu.rows import Row, add_ratios, make_row, matching
from benchmarks.gpu.table import print_rows, print_title
from benchmarks.gpu.traffic import floor_bytes


def measure(bench: Bench, results: Results, *, sizes: Sequence[int], bits: Sequence[float]) -> None:
    """All dtypes at sizes and bits."""
    results["rows"] = rows = []
    print_title()
    for size in sizes:
        for one_bits in bits:
            for dtype in bench.options.dtypes:
                label = f"{size} {dtype} {one_bits:g} bits"
                if bench.record.may_start(label):
                    with bench.record.case(label):
                        rows += _measure(bench, Case(bench, size, dtype, one_bits))
                    bench.record.write()


def _measure(bench: Bench, case: Case) -> list[Row]:
    """Rows of the case but for those that are known, as bits do not change them."""
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
