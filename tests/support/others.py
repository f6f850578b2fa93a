"""Packages of others, with which optional tests compare."""

import importlib
import os
from types import ModuleType

import pytest

# Set by `make test-oracles`, which installs all of them.
REQUIRED = "ORACLES" in os.environ


def package(name: str) -> ModuleType:
    """Import a module of another package. Where it is not installed, skip the test or its file."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library that it loads
        if REQUIRED:
            raise
        words = f"{name.partition('.')[0]} is not installed ({error}): make test-oracles"
        pytest.skip(words, allow_module_level=True)
