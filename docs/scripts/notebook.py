"""Outputs of the notebook, from a run in a new kernel.

python -m docs.scripts.notebook
"""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_compressed_step.ipynb"
# Whatever else a kernel or an editor adds would differ between machines.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read() -> nbformat.NotebookNode:
    """Read the notebook."""
    return nbformat.read(NOTEBOOK, as_version=4)


def executed(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run the cells of a notebook from top to bottom, and return it with their outputs.

    Raises:
      CellExecutionError: a cell raises an error.
    """
    # In the root of the checkout, so that its library is imported.
    folder = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, record_timing=False, resources=folder).execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    return notebook


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the text that each code cell has printed."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main() -> None:
    """Run the notebook and write its outputs into its file."""
    nbformat.write(executed(read()), NOTEBOOK)
    print(f"wrote {NOTEBOOK.name}")


if __name__ == "__main__":
    main()
