"""The figure: time of a hop by bits, and the share of copy bandwidth by size."""

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.operations import KERNELS
from benchmarks.gpu.rows import matching


def save(bench: Bench) -> None:
    """Draws the results beside the JSON, where matplotlib is there."""
    path = bench.record.path
    if path is None or importlib.util.find_spec("matplotlib") is None:
        return
    try:
        _draw(bench, path.with_suffix(".png"))
    except Exception as error:
        print(f"no plot: {type(error).__name__}: {error}")


def _draw(bench: Bench, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not matching(bench.rows, implementation="triton"):
        return
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for number, dtype in enumerate(bench.options.dtypes):
        _draw_hop(axes[0], bench, dtype, f"C{number}")
        _draw_bandwidth(axes[1], bench, dtype, f"C{number}")
    size, bits = bench.options.sizes[0], bench.options.bits[0]
    axes[0].set(xlabel="bits", ylabel="ps per coordinate", yscale="log")
    axes[0].set_title(f"hop, {size / 2**20:g} Mi coordinates")
    axes[1].set(xlabel="Mi coordinates", xscale="log", ylim=(0, None))
    axes[1].set_title(f"bandwidth over that of a copy, {bits:g} bits")
    for axis in axes:
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_hop(axis: Any, bench: Bench, dtype: str, color: str) -> None:
    hops = matching(bench.rows, operation="hop", dtype=dtype, size=bench.options.sizes[0])
    triton = matching(hops, implementation="triton")
    for name, style in {"triton": "-o", "xla": "--s"}.items():
        points = [
            (row["bits"], row["ps_per_coordinate"]) for row in matching(hops, implementation=name)
        ]
        _line(axis, points, style, color=color, label=f"{name}, {dtype}")
    floor = [
        (row["bits"], row["bytes_per_coordinate"] / bench.copy_bytes_per_second * 1e12)
        for row in triton
    ]
    _line(axis, floor, ":", color=color, label=f"its bytes, {dtype}")


def _draw_bandwidth(axis: Any, bench: Bench, dtype: str, color: str) -> None:
    for operation, marker in zip(KERNELS, "osv^", strict=True):
        rows = matching(bench.rows, operation=operation, implementation="triton", dtype=dtype)
        points = [
            (row["size"] / 2**20, row["fraction_of_copy"])
            for row in rows
            if row["bits"] in (None, bench.options.bits[0])
        ]
        _line(axis, points, f"-{marker}", color=color, label=f"{operation}, {dtype}")


def _line(axis: Any, points: list[tuple[float, float]], style: str, **kwargs: Any) -> None:
    if points:
        axis.plot(*zip(*sorted(points), strict=True), style, **kwargs)
