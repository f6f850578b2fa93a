"""Tables and plots of commands."""

import io

import pytest
from rich.console import Console

from dynamiq_jax._console import plots, tables

CELLS = (("dynamiq:5:ring", "356 us", "8.1e-16", "2.91 Gbit/s"), ("psum", "1.2 ms", "", "same"))


def printed(width):
    table = tables.table("times", ("setting",), ("time", "vNMSE", "beats BF16 below"))
    for *row, last in CELLS:
        table.add_row(*row, f"[green]{last}[/green]")
    table.caption = "vNMSE: an error."
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", (40, 60, 80, 160))
def test_no_cell_is_cut(width):
    text = printed(width)
    assert all(cell in text for row in CELLS for cell in row)
    assert "times" in text and "vNMSE: an error." in text
    assert max(map(len, text.splitlines())) <= width


def test_rows_are_lines_where_a_table_does_not_fit():
    assert "  time: 356 us\n  vNMSE: 8.1e-16\n" in printed(40)
    assert "  vNMSE: \n" not in printed(40)
    assert "time:" not in printed(80)


@pytest.mark.parametrize("errors", ((0.0, 0.0), (0.0, 1e-3)))
def test_errors_of_zero_can_be_drawn(tmp_path, errors):
    rows = [
        {"method": f"bf16:{n}", "topology": "ring", "workers": 3, "bits": 16.0, "seconds": 1e-3}
        | {"vnmse": error}
        for n, error in enumerate(errors)
    ]
    plots.save_errors(tmp_path / "errors.png", rows, "a link")
    assert (tmp_path / "errors.png").stat().st_size > 10_000
