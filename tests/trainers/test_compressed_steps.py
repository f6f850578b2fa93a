"""Train steps of other packages train by `dq.compress` as they do: `make test-trainers`."""

import importlib.util

import numpy as np
import pytest

from benchmarks.trainers import compressed_steps as benchmark
from benchmarks.trainers.steps_of_others import TRAININGS

# Largest difference of losses, in parts of the largest one. Rounding changes actions that A2C
# samples, and so all later episodes.
TOLERANCE = {"brax": 0.03, "jumanji": 0.6, "flaxdiff": 0.01, "diffusionjax": 0.03}


@pytest.mark.parametrize("name", TRAININGS)
def test_a_step_of_others_is_compressed_by_a_wrap_alone(name):
    package = TRAININGS[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"make test-trainers installs {package}")
    exact, compressed = (benchmark.train(name, method) for method in ("", "dynamiq"))
    losses, others = np.array(exact["losses"]), np.array(compressed["losses"])
    assert losses.shape == others.shape
    assert np.any(losses != others)
    assert np.max(np.abs(losses - others)) < TOLERANCE[name] * np.max(np.abs(losses))
    assert compressed["sums_compressed"] > 0
    assert compressed["groups"] >= 1
    assert compressed["bytes_before"] > 3 * compressed["bytes_after"] > 0
