"""The notebook runs top to bottom, and shows what it did when it was written."""

import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
PATH = ROOT / "examples/first_compressed_step.ipynb"


def printed(notebook) -> list[str]:
    """Texts that cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.text for output in outputs if output.output_type == "stream"]


def without_numbers(text: str) -> list[str]:
    """Words of a text: losses and errors depend on the version of JAX in their last digits."""
    return re.sub(r"\d[\d.,e-]*", "#", text).split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel and its client
def test_it_runs_and_prints_what_it_shows(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    written = nbformat.read(PATH, as_version=4)
    run = nbformat.read(PATH, as_version=4)
    NotebookClient(run, timeout=300, resources={"metadata": {"path": ROOT / "examples"}}).execute()
    assert list(map(without_numbers, printed(run))) == list(map(without_numbers, printed(written)))
    losses = [float(last) for last in re.findall(r"-> ([\d.]+)", "".join(printed(run)))]
    assert len(losses) == 2 and max(losses) < 0.05
    assert "No mistake found" in "".join(printed(run))


def test_all_cells_were_run_in_order():
    code = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [o for cell in code for o in cell.outputs if o.output_type == "error"]
    images = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", ())]
    assert len(images) == 1
