"""Timed operations as rows of the results and as lines on the terminal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.error.plain_codecs import PLAIN_CODECS
from benchmarks.gpu.jobs import program_key

SHORT_US = 50.0  # calls below this are near what the host needs to start one
ALTERNATIVES = ("mosaic_gpu", "xla", *PLAIN_CODECS)  # to the default kernels

Row = dict[str, Any]


def make_row(
    key: tuple, timing: dict[str, Any], *, input_sets: int, moved: float, copy: float
) -> Row:
    """Make the row of an executable.

    Args:
      key: key of the executable, see `program_key`.
      timing: its time, see `GpuBench.measure`.
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
