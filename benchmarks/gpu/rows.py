"""A timed operation as a row of the results."""

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.baselines import PLAIN_CODECS
from benchmarks.gpu.operations import program_key

SHORT_US = 50.0  # calls below this are near what the host needs to start one
ALTERNATIVES = ("xla", *PLAIN_CODECS)  # to the kernels

Row = dict[str, Any]


def make_row(
    key: tuple, timing: dict[str, Any], *, input_sets: int, moved: float, copy: float
) -> Row:
    """The row of an executable; `moved` bytes of a coordinate, `copy` bytes per second."""
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
    """Adds times of the alternatives over the kernel's."""
    times = {row["key"]: row["us"] for row in among}
    for row in matching(rows, implementation="triton"):
        for name in ALTERNATIVES:
            key = program_key(row["operation"], name, row["size"], row["dtype"], row["bits"])
            other = times.get(str(key))
            row[f"{name}_over_triton"] = other / row["us"] if other else None


def matching(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Rows that hold all of the values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]
