"""What a command prints: tables of any width, readers that end first, signals and files."""

import io
import json
import os
import signal

import pytest
from rich.console import Console

from dynamiq_jax._console import tables
from dynamiq_jax._console.program import ending_with_reader, finish
from tests.support.commands import command

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


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("arguments", (("--help",), ("--version",), ("advise", "--help")))
def test_a_reader_that_is_gone_is_no_error(arguments):
    """The status is that of a process that SIGPIPE ends."""
    assert without_a_reader(*arguments) == (141, "")


@pytest.mark.slow
def test_a_reader_that_is_gone_costs_no_results(tmp_path):
    """Tables are printed by rich, which would end the process with 1."""
    results = tmp_path / "results.json"
    assert without_a_reader("advise", "--json", str(results)) == (141, "")
    assert json.loads(results.read_text())["results"]


def without_a_reader(*arguments):
    """Return the status of a command whose output nobody reads, and its errors."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = command(*arguments, stdout=writer)
    finally:
        os.close(writer)
    return ended.returncode, ended.stderr


def test_other_broken_pipes_are_errors(capfd):
    with pytest.raises(BrokenPipeError), ending_with_reader():
        raise BrokenPipeError


def test_an_interrupt_ends_a_command_in_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        finish("name", interrupted)
    assert ended.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err == "name: stopped by SIGINT.\n"
