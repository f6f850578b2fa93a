"""The notebook runs top to bottom, and shows what it did when it was written."""

import re

import pytest

from docs.scripts import notebook

pytestmark = pytest.mark.optimized  # as users run it


def without_numbers(text: str) -> list[str]:
    """Words of a text: losses and errors depend on the version of JAX in their last digits."""
    return re.sub(r"\d[\d.,e-]*", "#", text).split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel and its client
def test_it_runs_and_prints_what_it_shows():
    """Where it does not, run `python -m docs.scripts.notebook`."""
    written = notebook.printed(notebook.read())
    run = notebook.printed(notebook.executed(notebook.read()))
    assert list(map(without_numbers, run)) == list(map(without_numbers, written))
    text = "".join(run)
    losses = [float(last) for last in re.findall(r"-> ([\d.]+)", text)]
    assert len(losses) == 2 and max(losses) < 0.05
    assert "No mistake found" in text
    assert len(re.findall(r"  compressed, group 0$", text, flags=re.MULTILINE)) == 2
    # Of two formats, in the order of their bits.
    five, four = (float(re.search(rf"dynamiq:{n} .*error (\S+)", text)[1]) for n in (5, 4))
    assert 1e-4 < 2 * five < four < 1e-1


def test_all_cells_were_run_in_order():
    code = [cell for cell in notebook.read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    # No errors, and no warnings.
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert not [output for output in outputs if output.output_type == "error"]
    images = [output for output in outputs if "image/png" in output.get("data", ())]
    assert len(images) == 1
    assert notebook.NOTEBOOK.stat().st_size < 150_000  # Git keeps every version.
