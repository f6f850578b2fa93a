"""The folder of a real language model."""

from pathlib import Path

from examples.llm.checkpoint import CONFIG


def check_folder(folder: Path, option: str = "--model") -> None:
    """End the program with one line if a folder has no model."""
    if not (folder / CONFIG).is_file():
        raise SystemExit(f"{option} is {folder}, which has no model. Run `make demo-llm`.")
