"""MaxText trains through the hook of its recipe as it does exactly. See `make test-trainers`."""

import inspect
import os
from pathlib import Path

import jax
import maxtext
import numpy as np
import pytest
from flax import nnx
from flax.core.spmd import logical_axis_rules

import dynamiq_jax as dq
from benchmarks.trainers import maxtext as benchmark

os.environ["DECOUPLE_GCLOUD"] = "TRUE"
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

from benchmarks.trainers import maxtext_hook

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def standard_promotion(monkeypatch):
    monkeypatch.setattr(train, "loss_fn", train.loss_fn)  # the hook replaces it
    with jax.numpy_dtype_promotion("standard"):
        yield


def initialized(folder, **options):
    settings = benchmark.MACHINE | benchmark.MODEL | benchmark.RUNS["data"].options | options
    settings |= {"run_name": "test", "base_output_directory": folder}
    base = Path(inspect.getfile(maxtext)).parent / "configs" / "base.yml"
    return train.initialize(["", str(base), *(f"{k}={v}" for k, v in settings.items())])


def test_the_logged_loss_is_that_of_all_targets(tmp_path):
    """Rows are of several lengths, so workers have different numbers of targets."""
    config, recorder = initialized(tmp_path, dtype="float32")
    parts = train_utils.setup_train_loop(config, recorder)
    model, batch = parts[-1].model, dict(next(parts[6]))
    rows, length = batch["targets"].shape
    lengths = np.linspace(8, length, rows).astype(int)[:, None]
    batch["targets_segmentation"] = (np.arange(length) < lengths).astype(np.int32)
    with jax.set_mesh(model.mesh), logical_axis_rules(config.logical_axis_rules):
        exact = nnx.jit(lambda model, batch: train.loss_fn(model, config, batch, None, None)[0])
        whole = float(exact(model, dict(batch)))
    maxtext_hook.compress_gradients(config)
    with jax.set_mesh(model.mesh), logical_axis_rules(config.logical_axis_rules):
        arguments = model, config, dict(batch), None, None
        dq.check_data_parallel(train.loss_fn, *arguments, is_train=True)
        loss, aux = train.loss_fn(*arguments, is_train=True)
    assert int(aux["total_weights"]) == lengths.sum()
    np.testing.assert_allclose(loss, whole, rtol=1e-5)
    np.testing.assert_allclose(aux["xent_sum"] / aux["total_weights"], loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_mode": "explicit"}, "shard_mode=explicit"),
        ({"per_device_batch_size": 0.5}, "per_device_batch_size=0.5"),
        ({"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}, "no axis for pipelines"),
    ],
)
def test_settings_that_train_something_else_are_refused(tmp_path, options, words):
    config, _ = initialized(tmp_path, **options)
    with pytest.raises(ValueError, match=words):
        maxtext_hook.compress_gradients(config)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("flash", 0.003), ("experts", 0.003), ("fast", 0.012), ("diloco", 0.003)],
)
def test_training_goes_on_as_before_with_fewer_bytes(name, tolerance):
    steps = 20
    exact = benchmark.train(name, "", steps)
    compressed = benchmark.train(name, "dynamiq", steps)
    losses = exact["losses"][-1], compressed["losses"][-1]
    assert losses[0] < 0.95 * exact["losses"][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=tolerance)
    assert losses[1] != losses[0]
    compared = benchmark.compare({"exact": exact, "compressed": compressed})
    assert compared["ratio_bf16"] >= 3.1
    assert compared["ratio_of_others"] <= 1.02


def test_the_hook_is_as_exact_as_maxtext():
    losses = [benchmark.train("data", method, 20)["losses"][-1] for method in ("", "exact")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
