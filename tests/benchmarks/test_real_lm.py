"""Measurements on a real language model, run on a tiny one."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from benchmarks import common
from benchmarks.real_lm import errors, gradients, texts, time_to_accuracy, training
from tests.support import llm_files


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with a tiny checkpoint; its chats stand for those of the standard library."""
    llm_files.write(tmp_path)
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    monkeypatch.setattr(texts, "conversations", lambda: chats)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield tmp_path / "start"


def test_gradients_of_workers_average_to_that_of_all_rows(model):
    """Workers with more targets weigh more."""
    each, whole = (
        list(gradients.worker_gradients(model, "chats", workers=w, batch=b, context=32))
        for w, b in ((4, 2), (1, 8))
    )
    assert [gradients.kind_of(name) for name in list(whole[0])[:2]] == ["embedding", "norm"]
    for name, expected in whole[0].items():
        mean = np.mean([gradient[name] for gradient in each], axis=0)
        np.testing.assert_allclose(mean, expected, atol=1e-5 * np.abs(expected).max())
        assert np.any(each[0][name] != each[1][name])


def test_errors_are_measured_once(model, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(errors, "make_devices", lambda workers: None)
    config = errors.Config(
        model=model,
        texts=("chats",),
        methods=("exact", "dynamiq:5", "powersgd"),
        workers=(2,),
        context=32,
    )
    errors.main(config)
    path = tmp_path / "real_lm_errors.json"
    rows = {row["method"]: row for row in json.loads(path.read_text())["results"]}
    assert rows["exact"]["vnmse"] < 1e-12 < 1e-6 < rows["dynamiq:5"]["vnmse"] < 1e-2
    assert rows["dynamiq:5"]["bits"] < 10 < rows["exact"]["bits"]
    assert 0.01 < rows["powersgd"]["vnmse"] < 1
    for row in rows.values():
        assert sum(row["energy_of_kind"].values()) == pytest.approx(1)
        weighted = [row["of_kind"][k] * share for k, share in row["energy_of_kind"].items()]
        assert sum(weighted) == pytest.approx(row["vnmse"], rel=1e-6)
        assert set(row["of_layer"]) == {"0"}
    before = path.read_bytes()
    monkeypatch.setattr(errors, "gradients", None)  # not needed again
    errors.main(config)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_each_run_is_trained_once_in_a_process_of_its_own(model, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    config = training.Config(
        model=model,
        folder=tmp_path / "runs",
        count=30,
        methods=("exact", "dynamiq:3"),
        workers=2,
        steps=3,
        context=32,
        learning_rate=1e-2,
        optimizer="muon",
    )
    training.main(config)
    path = tmp_path / "real_lm_training_muon.json"
    exact, ours = json.loads(path.read_text())["results"]
    assert exact["error"] < 1e-12 < 1e-3 < ours["error"] < 0.2
    assert ours["bytes"] < exact["bytes"]
    assert training.final(exact) < exact["held_out"]["0"]
    assert 0 < abs(training.final(ours) / training.final(exact) - 1) < 0.05
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
    before = path.read_bytes()
    monkeypatch.setattr(training, "run", None)  # not needed again
    training.main(config)
    assert path.read_bytes() == before


def test_time_to_accuracy_counts_steps_and_what_never_gets_there():
    losses = {"exact": [3.0, 2.0, 1.0], "dynamiq:5": [3.0, 2.02, 1.01], "mxfp4": [3.0, 2.5, 2.0]}
    rows = {
        name: time_to_accuracy.result(
            {"method": name, "held_out": dict(zip(("0", "10", "20"), values, strict=True))},
            rate=1e9,
            step=step,
            target=1.02,
        )
        for (name, values), step in zip(losses.items(), (3.0, 1.0, 1.0), strict=True)
    }
    assert rows["exact"]["steps_to_target"] == pytest.approx(19.8)
    assert rows["exact"]["seconds_to_target"] == pytest.approx(59.4)
    assert rows["dynamiq:5"]["seconds_to_target"] == pytest.approx(10 + 10 * 1.0 / 1.01)
    assert rows["mxfp4"]["seconds_to_target"] is None
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(time_to_accuracy.table({"target": 1.02, "rows": list(rows.values())}))
    text = console.export_text()
    assert f"{59.4 / (10 + 10 / 1.01):.2f}x" in text
    assert text.count("not reached") == 3
