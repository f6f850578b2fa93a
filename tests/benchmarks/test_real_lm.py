"""Measurements on a real language model, run on a tiny one."""

import json

import jax
import numpy as np
import pytest

from benchmarks import common
from benchmarks.real_lm import errors, gradients, texts
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
