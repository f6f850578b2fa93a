"""Train steps of other packages train by `dq.compress` as they do: `make test-trainers`."""

import importlib.util

import numpy as np
import pytest

from benchmarks.trainers.measured import TRAININGS, train

# Largest difference of losses, in parts of the largest one. Rounding changes actions that A2C
# samples, and so all later episodes.
TOLERANCE = {"brax": 0.03, "jumanji": 0.6, "diffusionjax": 0.03, "blaxbird": 0.03}
# Others are trained by the benchmark alone.
TESTED = sorted(
    TRAININGS.keys() - {"maxtext_fast", "maxtext_flash", "maxtext_tensor", "maxtext_diloco"}
)
AXES = {"batch", "data", "diloco"}  # of the workers


def sent(measured):
    """Bytes between workers in the compiled step."""
    by_axes = measured["bytes_sent"].items()
    return sum(count for axes, count in by_axes if AXES & set(axes.split(", ")))


def measured(name, method):
    if importlib.util.find_spec(TRAININGS[name].module) is None:
        pytest.skip(f"make test-trainers installs {TRAININGS[name].package}")
    return train(name, method)


@pytest.mark.parametrize("name", TESTED)
def test_a_step_of_others_is_compressed_by_a_wrap_alone(name):
    unwrapped, compressed = (measured(name, method) for method in ("", "dynamiq"))
    losses, others = np.array(unwrapped["losses"]), np.array(compressed["losses"])
    assert losses.shape == others.shape
    assert np.any(losses != others)
    tolerance = TOLERANCE.get(name, 0.01)
    assert np.max(np.abs(losses - others)) < tolerance * np.max(np.abs(losses))
    assert compressed["sums_compressed"] > 0
    assert compressed["groups"] >= 1
    assert compressed["bytes_before"] > 3 * compressed["bytes_after"] > 0
    if "bytes_sent" in compressed:
        assert sent(unwrapped) > 2.8 * sent(compressed) > 0
        assert sent(compressed) >= compressed["bytes_after"]


@pytest.mark.parametrize(
    "name", ["blaxbird", "flowjax", "keras", "maxtext_data", "numpyro", "penzai", "tunix_all"]
)
def test_a_wrap_with_exact_sums_changes_no_loss(name):
    """But for the order of a sum, and for what XLA keeps between sums of 16 bits."""
    losses, others = (measured(name, method)["losses"] for method in ("", "exact"))
    rtol = 1e-3 if name == "maxtext_data" else 1e-5
    np.testing.assert_allclose(others, losses, rtol=rtol)
