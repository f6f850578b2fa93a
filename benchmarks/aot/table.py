"""How tables look."""

from rich import box
from rich.table import Table


def new_table(title: str, headings: str) -> Table:
    """Empty, with headings that are separated by commas."""
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in headings.split(","):
        table.add_column(heading, justify="right")
    return table
