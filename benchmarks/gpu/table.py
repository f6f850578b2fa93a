"""Rows as lines of a table on the terminal."""

from collections.abc import Callable, Sequence

from benchmarks.gpu.rows import SHORT_US, Row


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
    ("operation", 16, _operation),
    ("us", 10, lambda row: f"{row['us']:.1f}" + ("*" if row["short"] else " ")),
    ("+-%", 4, lambda row: f"{100 * row['spread']:.0f}"),
    ("ps/co", 8, lambda row: f"{row['ps_per_coordinate']:.3f}"),
    ("B/co", 6, lambda row: f"{row['bytes_per_coordinate']:.3f}"),
    ("GB/s", 7, lambda row: f"{row['gigabytes_per_second']:.0f}"),
    ("of copy", 7, lambda row: f"{row['fraction_of_copy']:.3f}"),
    ("xla/t", 6, _ratio("xla")),
    ("int8/t", 6, _ratio("int8")),
    ("mx/t", 6, _ratio("mxfp8")),
)


def print_title() -> None:
    """The line above the rows."""
    print(" ".join(heading.rjust(width) for heading, width, _ in _COLUMNS))


def print_rows(rows: Sequence[Row]) -> None:
    """One line for each row."""
    for row in rows:
        print(" ".join(text(row).rjust(width) for _, width, text in _COLUMNS), flush=True)
    if any(row["short"] for row in rows):
        print(f"* below {SHORT_US:g} us: starting calls may be what is measured")
