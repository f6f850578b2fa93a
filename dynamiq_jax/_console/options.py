"""Checks of options that several commands have."""

import importlib.util
import os
from pathlib import Path

from dynamiq_jax._console.errors import CommandError, install_extra

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
MAX_SEED = 2**31 - 1  # repeats count on from it, and all are uint32


def check_range(option: str, value: float | None, least: float, most: float | None = None) -> None:
    """Raise CommandError for a number that is out of range. None is not given."""
    if value is None or (least <= value and (most is None or value <= most)):
        return
    possible = f"at least {least}" if most is None else f"{least} to {most:.10g}"
    raise CommandError(f"{option} is {value}: give {possible}.")


def check_outputs(json_path: Path | None, plot_path: Path | None = None) -> None:
    """Raise CommandError, before minutes of measuring, if results could not be written."""
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise CommandError(f"{option} is {path}: no folder {folder}. Make it.")
        if path.is_dir():
            raise CommandError(f"{option} is {path}: this is a folder. Give a file in it.")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise CommandError(f"{option} is {path}: this user cannot write it. Give another file.")
    if plot_path is not None:
        if plot_path.suffix not in PLOT_SUFFIXES:
            raise CommandError(f"--plot is {plot_path}: end its name in one of {PLOT_SUFFIXES}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError(f"--plot needs matplotlib: {install_extra('cli')}")
