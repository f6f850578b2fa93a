"""A command whose output nobody reads any more, as that of `dynamiq-jax --help | head`."""

import json
import os
import subprocess
import sys

import pytest
from dynamiq_jax._console.program import ending_with_reader

from tests.support.commands import ROOT


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
        ended = subprocess.run(
            [sys.executable, "-m", "dynamiq_jax", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    return ended.returncode, ended.stderr


def test_other_broken_pipes_are_errors(capfd):
    with pytest.raises(BrokenPipeError), ending_with_reader():
        raise BrokenPipeError
