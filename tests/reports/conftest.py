"""Keeps pytest from importing the scripts, which run as soon as they are imported."""

import pathlib

collect_ignore = [
    path.name for path in pathlib.Path(__file__).parent.glob("*.py") if "test" not in path.stem
]
