"""The folder of a real language model."""

from pathlib import Path

from examples.llm.checkpoint import CONFIG, read_object
from examples.llm.run import FACTS

TRAINED = "model"  # in the folder of a run


def check_folder(folder: Path, option: str = "--model") -> None:
    """End the program with one line if a folder has no model."""
    if not (folder / CONFIG).is_file():
        raise SystemExit(f"{option} is {folder}, which has no model. Run `make demo-llm`.")


def origin(folder: Path) -> tuple[str, int]:
    """Return the name of a folder's model, and the steps of fine-tuning that it has had.

    A model of `benchmarks.real_lm.training` has the name of the one that it started from, with all
    by which its run differs from an exact one of seed 0.
    """
    folder = folder.resolve()
    facts = folder.parent / FACTS
    if folder.name != TRAINED or not facts.is_file():
        return folder.name, 0
    run = read_object(facts)
    name = run["model"].split()[0]
    if run["method"] != "exact":
        name += f"-{run['method']}"
    if run["seed"]:
        name += f"-seed-{run['seed']}"
    return name, run["steps"]
