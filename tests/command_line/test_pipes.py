"""A command whose output nobody reads any more, as that of `dynamiq-jax --help | head`."""

import os
import subprocess
import sys

import pytest

from dynamiq_jax._console.pipes import ending_with_reader
from tests.support.commands import ROOT


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("arguments", (("--help",), ("--version",), ("advise", "--help")))
def test_a_reader_that_is_gone_is_no_error(arguments):
    """The status is that of a process that SIGPIPE ends."""
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
    assert (ended.returncode, ended.stderr) == (141, "")


def test_other_broken_pipes_are_errors(capfd):
    with pytest.raises(BrokenPipeError), ending_with_reader():
        raise BrokenPipeError
