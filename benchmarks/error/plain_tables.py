"""Tables on a terminal, for benchmarks that run on machines without rich."""

from collections.abc import Sequence


def print_table(title: str, headings: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column left-aligned.

    Args:
      title: line above the table.
      headings: headings of all columns but the first, separated by commas.
      rows: texts of the cells.
    """
    lines = [["", *headings.split(",")], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first, *(cell.strip().rjust(len(cell)) for cell in others)]).rstrip())
