"""Timed operations as rows of the results, as lines on the terminal, and in a plot."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.error.plain_codecs import PLAIN_CODECS
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.jobs import KERNELS, program_key

SHORT_US = 50.0  # calls below this are near what the host needs to start one
ALTERNATIVES = ("mosaic_gpu", "xla", *PLAIN_CODECS)  # to the default kernels

Row = dict[str, Any]


def make_row(
    key: tuple, timing: dict[str, Any], *, input_sets: int, moved: float, copy: float
) -> Row:
    """Make the row of an executable.

    Args:
      key: key of the executable, see `program_key`.
      timing: its time, see `Bench.measure`.
      input_sets: number of sets of arguments.
      moved: bytes of a coordinate that it has to move.
      copy: speed of a copy, bytes per second.
    """
    operation, implementation, size, dtype, bits = key
    speed = moved * size / timing["us"] * 1e6
    return {
        "key": str(key),
        "dtype": dtype,
        "size": size,
        "bits": bits,
        "operation": operation,
        "implementation": implementation,
        **timing,
        "input_sets": input_sets,
        "short": timing["us"] < SHORT_US,
        "ps_per_coordinate": timing["us"] / size * 1e6,
        "bytes_per_coordinate": moved,
        "gigabytes_per_second": speed / 1e9,
        "fraction_of_copy": speed / copy,
    }


def add_ratios(rows: Iterable[Row], among: Iterable[Row]) -> None:
    """Add times of the alternatives over those of the kernels."""
    times = {row["key"]: row["us"] for row in among}
    for row in matching(rows, implementation="triton"):
        for name in ALTERNATIVES:
            key = program_key(row["operation"], name, row["size"], row["dtype"], row["bits"])
            other = times.get(str(key))
            row[f"{name}_over_triton"] = other / row["us"] if other else None


def matching(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows that hold all of the values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def print_title() -> None:
    """Print the line above the rows."""
    print(" ".join(heading.rjust(width) for heading, width, _ in _COLUMNS))


def print_rows(rows: Sequence[Row]) -> None:
    """Print one line for each row."""
    for row in rows:
        print(" ".join(text(row).rjust(width) for _, width, text in _COLUMNS), flush=True)
    if any(row["short"] for row in rows):
        print(f"* below {SHORT_US:g} us: starting calls may be what is measured")


def save_plot(bench: Bench) -> None:
    """Draw the results beside the JSON file, if matplotlib is installed."""
    path = bench.record.path
    if path is None or importlib.util.find_spec("matplotlib") is None:
        return
    if matching(bench.rows, implementation="triton"):
        try:
            _draw(bench, path.with_suffix(".png"))
        except Exception as error:  # measuring went well all the same
            print(f"no plot: {type(error).__name__}: {error}")


def _operation(row: Row) -> str:
    name = row["implementation"]
    return row["operation"] + ("" if name == "triton" else f" {name}")


def _ratio(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(f"{name}_over_triton")
        return "" if value is None else f"{value:.2f}"

    return cell


# Heading, width, text of a cell.
_COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("dtype", 9, lambda row: row["dtype"]),
    ("Mi", 6, lambda row: f"{row['size'] / 2**20:.4g}"),
    ("bits", 4, lambda row: "" if row["bits"] is None else f"{row['bits']:g}"),
    ("operation", 21, _operation),
    ("us", 10, lambda row: f"{row['us']:.1f}" + ("*" if row["short"] else " ")),
    ("+-%", 4, lambda row: f"{100 * row['spread']:.0f}"),
    ("ps/co", 8, lambda row: f"{row['ps_per_coordinate']:.3f}"),
    ("B/co", 6, lambda row: f"{row['bytes_per_coordinate']:.3f}"),
    ("GB/s", 7, lambda row: f"{row['gigabytes_per_second']:.0f}"),
    ("of copy", 7, lambda row: f"{row['fraction_of_copy']:.3f}"),
    ("mg/t", 6, _ratio("mosaic_gpu")),
    ("xla/t", 6, _ratio("xla")),
    ("int8/t", 6, _ratio("int8")),
    ("mx/t", 6, _ratio("mxfp8")),
)


def _draw(bench: Bench, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

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
    for name, style in {"triton": "-o", "mosaic_gpu": "-.^", "xla": "--s"}.items():
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
