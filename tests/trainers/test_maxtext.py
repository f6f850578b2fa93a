"""MaxText trains by the lines of its recipe. See `make test-trainers`."""

import inspect
import json
import os
import sys
from pathlib import Path

import jax
import maxtext
import numpy as np
import pytest

from benchmarks.trainers import maxtext_steps
from benchmarks.trainers.measured import train

os.environ["DECOUPLE_GCLOUD"] = "TRUE"
from maxtext.trainers.diloco import utils
from maxtext.utils import train_utils

from tests.trainers.recipe import run_lines

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def maxtext_as_it_is(monkeypatch):
    monkeypatch.setattr(train_utils, "jit_train_step", train_utils.jit_train_step)
    for name in ("synchronize_full_state", "synchronize_fragment_state"):
        monkeypatch.setattr(utils, name, getattr(utils, name))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("run", ["data", "diloco"])
def test_the_lines_of_the_page_train(run, tmp_path, monkeypatch):
    options = maxtext_steps.MACHINE | maxtext_steps.MODEL | {"base_output_directory": tmp_path}
    options |= {"metrics_file": tmp_path / "metrics.json"}
    base = Path(inspect.getfile(maxtext)).parent / "configs" / "base.yml"

    def command(run):
        settings = options | maxtext_steps.RUNS[run].options
        return ["", str(base), *(f"{key}={value}" for key, value in settings.items())]

    monkeypatch.setattr(sys, "argv", command("data"))
    names = {}
    run_lines("maxtext.md", "The change", names)
    if run == "diloco":
        run_lines("maxtext.md", "DiLoCo", names)
        options["metrics_file"] = tmp_path / "others.json"
        names["train"].run(*names["train"].initialize(command("diloco")))
    lines = options["metrics_file"].read_text().splitlines()
    losses = [maxtext_steps.mean_loss(json.loads(line)) for line in lines]
    unwrapped = train(f"maxtext_{run}", "")["losses"]
    assert len(losses) == len(unwrapped)
    np.testing.assert_allclose(losses, unwrapped, rtol=0.01)
    assert losses != unwrapped
