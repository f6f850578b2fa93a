"""Situations of others' users: see the scripts beside this file, which also run alone.

python -m tests.reports.tied_parameters
"""

import pathlib
import runpy

import jax
import pytest

FOLDER = pathlib.Path(__file__).parent
NO_SCRIPTS = {"__init__", "conftest", "setup", "test_reports"}
SCRIPTS = sorted({path.stem for path in FOLDER.glob("*.py")} - NO_SCRIPTS)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_report_of_a_user_has_the_right_outcome(script, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [script])  # as of a command without options
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        runpy.run_module(f"tests.reports.{script}", run_name="__main__")
    assert capsys.readouterr() == ("", "")  # of Python: XLA logs what a busy machine delays


def test_there_are_reports():
    assert len(SCRIPTS) >= 30
