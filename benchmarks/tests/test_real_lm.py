"""Measurements on a real language model, run on a tiny one."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from benchmarks.error import dump_gradients, tensors
from benchmarks.error.tensors import ROW, Recipe, names_of
from benchmarks.harness import files
from benchmarks.real_lm import (
    errors,
    estimates,
    gradients,
    losses,
    texts,
    time_to_accuracy,
    training,
)
from docs.scripts import real_lm_tables
from dynamiq_jax._measurement import gradient_files
from examples.tests.support import llm_files
from examples.tools import digests
from tests.support.commands import shown


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder with a tiny checkpoint; its chats stand for those of the standard library.

    Results are written to the folder that holds it.
    """
    llm_files.write(tmp_path)
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    monkeypatch.setattr(texts, "conversations", lambda: chats)
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    monkeypatch.setattr(errors, "make_devices", lambda workers: None)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield tmp_path / "start"


@pytest.mark.slow
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


@pytest.mark.slow
def test_errors_are_measured_once(model, tmp_path, monkeypatch):
    methods = ("exact", "dynamiq:5", "mxfp4", "mlp 5.5, rest 4.3")
    config = errors.Config(model=model, texts=("chats",), methods=methods, workers=(2,), context=32)
    errors.main(config)
    path = tmp_path / "real_lm_errors.json"
    rows = {row["method"]: row for row in json.loads(path.read_text())["results"]}
    assert rows["exact"]["vnmse"] < 1e-12 < 1e-6 < rows["dynamiq:5"]["vnmse"] < 1e-2
    assert rows["dynamiq:5"]["bits"] < 10 < rows["exact"]["bits"]
    assert 1e-6 < rows["mlp 5.5, rest 4.3"]["vnmse"] < 1e-2
    assert 0.01 < rows["mxfp4"]["vnmse"] < 0.1
    for row in rows.values():
        assert sum(row["energy_of_kind"].values()) == pytest.approx(1)
        weighted = [row["of_kind"][k] * share for k, share in row["energy_of_kind"].items()]
        assert sum(weighted) == pytest.approx(row["vnmse"], rel=1e-6)
        assert set(row["of_layer"]) == {"0"}
    before = path.read_bytes()
    monkeypatch.setattr(errors, "gradients", None)  # not needed again
    errors.main(config)
    assert path.read_bytes() == before


def test_errors_of_other_rows_or_weights_are_measured_again(model, tmp_path, monkeypatch):
    """Rows of files with one model, which name none, are those of that model."""
    measured = []
    monkeypatch.setattr(errors, "gradients", lambda config, text, workers: (None, None))
    result = {"vnmse": 0.1, "bits": 5.0, "of_kind": dict.fromkeys(gradients.KINDS, 0.1)}
    monkeypatch.setattr(errors, "measured", lambda *given: measured.append(given) or result)
    options = {"texts": ("chats",), "methods": ("bf16",), "workers": (2,), "context": 32}
    first = errors.Config(model=model, **options)
    errors.main(first)
    path = tmp_path / "real_lm_errors.json"
    saved = json.loads(path.read_text())
    for row in saved["results"]:
        assert row.pop("model") == "start"
    path.write_text(json.dumps(saved | {"config": {"model": "start"}}))
    other = shutil.copytree(model, tmp_path / "other")
    changes = ({}, {"batch": 3}, {"context": 16}, {"model": other}, {"model": trained(model, 1)})
    for change in changes:
        errors.main(dataclasses.replace(first, **change))
    assert len(measured) == len(changes)
    rows = json.loads(path.read_text())["results"]
    found = [(row["model"], row["batch"], row["context"], row["step"]) for row in rows]
    assert found[0] == ("start", 2, 32, 0) and len(set(found)) == len(changes)


def trained(model, steps, **facts):
    """Copy a model to where `benchmarks.real_lm.training` leaves one."""
    run = {"model": f"{model.name} in float32", "method": "exact", "seed": 0, "steps": steps}
    run |= facts
    folder = model.parent / "-".join(map(str, run.values()))
    shutil.copytree(model, folder / "model")
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "model"


def test_a_model_is_named_by_the_run_that_trained_it(model):
    """Neither its seed nor its steps are left to who measures it."""
    assert errors.origin(model) == ("start", 0)
    assert errors.origin(trained(model, 150)) == ("start", 150)
    assert errors.origin(trained(model, 40, seed=1)) == ("start-seed-1", 40)
    assert errors.origin(trained(model, 40, method="mxfp4")) == ("start-mxfp4", 40)


@pytest.mark.slow
def test_estimated_errors_are_close_to_those_of_real_gradients(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "worker_gradients", shorter_rows)
    config = estimates.Config(
        model=model, bits=(4,), workers=(2,), keys=4, size=8 * ROW, folder=tmp_path / "tensors"
    )
    estimates.main(config)
    rows = json.loads((tmp_path / "real_lm_estimates.json").read_text())["results"]
    assert [row["kind"] for row in rows] == names_of(Recipe(model=model))
    for row in rows:
        assert 0.5 < np.mean(row["ratios"]) < 2
        assert len(set(row["ratios"])) == config.keys


@pytest.mark.slow
def test_each_run_is_trained_once_in_a_process_of_its_own(model, tmp_path, monkeypatch):
    config = training.Config(
        model=model,
        folder=tmp_path / "runs",
        count=30,
        methods=("exact", "dynamiq:3", "embedding 4, rest 5.3"),
        workers=2,
        steps=3,
        context=32,
        learning_rate=1e-2,
        optimizer="muon",
        rare=100,
    )
    training.main(config)
    path = tmp_path / "real_lm_training_muon.json"
    exact, ours, policy = json.loads(path.read_text())["results"]
    assert exact["bytes"] > policy["bytes"] > ours["bytes"]
    assert (tmp_path / "runs/muon-embedding-4-rest-5.3-0/metrics.jsonl").exists()
    assert exact["error"] < 1e-12 < 1e-3 < ours["error"] < 0.2
    assert losses.final(exact) < exact["held_out"]["0"]
    assert 0 < abs(losses.final(ours) / losses.final(exact) - 1) < 0.05
    assert ours["rare"] > 0 and ours["rare"] != exact["rare"]
    assert exact["distance"]["all"] < 0.5 * ours["distance"]["all"]
    assert set(ours["distance"]) == {*gradients.KINDS, "all"}
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
    assert all(row["commit"] and row["date"] for row in (exact, ours, policy))
    facts = (tmp_path / "runs/muon-exact-0/run.json").read_text()
    shorter = dataclasses.replace(config, steps=2, output=tmp_path / "shorter.json")
    with pytest.raises(SystemExit, match="exact, seed 0: the run failed"):
        training.main(shorter)  # in the same folder
    assert (tmp_path / "runs/muon-exact-0/run.json").read_text() == facts
    before = path.read_bytes()
    monkeypatch.setattr(training, "run", None)  # not needed again
    training.main(config)
    assert path.read_bytes() == before


SETTINGS = {  # of the options, as result files have them since the first one
    "model": "start",
    "folder": "",
    "text": "chats",
    "count": 640,
    "methods": ["exact", "mxfp8"],
    "seeds": 1,
    "workers": 4,
    "steps": 150,
    "context": 128,
    "learning_rate": 5e-05,
    "optimizer": "adamw",
}
RUN = {"method": "exact", "seed": 0, "held_out": {"0": 3.0, "150": 2.5}, "error": 0.0, "bytes": 8e8}


def test_runs_of_other_settings_are_not_overwritten(model, tmp_path, capsys):
    path, data = tmp_path / "real_lm_training.json", tmp_path / "runs" / "chats-640.jsonl"
    data.parent.mkdir()
    data.write_text("chats of this Python")
    settings = SETTINGS | {"documents": digests.of_files([data])}
    path.write_text(json.dumps({"config": settings, "results": [RUN]}))
    config = training.Config(model=model, folder=data.parent, methods=("exact",))
    training.main(config)  # has this run
    assert "2.5000" in capsys.readouterr().out
    before = path.read_bytes()
    for change, words in (
        ({"steps": 40}, "steps 150, now 40"),
        ({"count": 30}, r"count 640, now 30, documents \w+, now \w+"),
        ({"text": "plain"}, r"text chats, now plain, documents \w+, now \w+"),
    ):
        with pytest.raises(SystemExit, match=rf"has runs of {words}\. .* another --output"):
            training.main(dataclasses.replace(config, **change))
    data.write_text("chats of another one")
    with pytest.raises(SystemExit, match=r"has runs of documents \w+, now \w+\. "):
        training.main(config)
    assert path.read_bytes() == before
    shorter = dataclasses.replace(config, steps=40, output=tmp_path / "short.json")
    assert training.earlier_rows(shorter.result, shorter.settings) == []


def test_gradients_of_a_checkpoint_are_written(model, tmp_path, monkeypatch):
    path = tmp_path / "g.npz"
    options = dump_gradients.Config(
        model="smollm2", checkpoint=model, workers=2, kinds=("mlp",), layers=(0,), output=path
    )
    monkeypatch.setattr(dump_gradients, "worker_gradients", shorter_rows)
    dump_gradients.main(options)
    (label, found), *none = gradient_files.load(path).items()
    assert (label, none) == ("", [])
    names = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert found.keys() == names
    expected = list(shorter_rows(model, "chats", workers=2))
    for name in names:
        np.testing.assert_array_equal(found[name], [each[name] for each in expected])


def shorter_rows(folder, text, *, workers, batch=1, context=32):
    return gradients.worker_gradients(folder, text, workers=workers, batch=1, context=32)


def test_tables_have_methods_of_later_steps_and_no_policies(monkeypatch):
    row = {
        "step": 0,
        "text": "chats",
        "workers": 8,
        "topology": "ring",
        "bucketing": "auto",
        "method": "dynamiq:5",
        "seed": 0,
        "batch": 2,
        "context": 256,
        "bits": 5.0,
        "vnmse": 1e-3,
        "of_kind": dict.fromkeys(gradients.KINDS, 2e-3),
    }
    rows = [
        row,
        row | {"method": "mxfp6", "step": 150, "bits": 6.25},
        row | {"method": "mlp 5.5, rest 4.3"},
        row | {"vnmse": 0.9, "batch": 4},
        row | {"vnmse": 0.9, "model": "another"},
        row | {"bucketing": "in_order", "method": "allocated dynamiq:5"},
        row | {"model": "smollm2-seed-1", "step": 150, "vnmse": 2e-3},
    ]
    monkeypatch.setattr(real_lm_tables, "results_of", lambda name: rows)
    assert real_lm_tables.real_lm_errors().splitlines()[2:] == [
        "| `mxfp6` | 6.25 |  | 1.0e-3 |  |  |  |",
        "| `dynamiq:5` | 5.00 | 1.0e-3 |  | 2.0e-3 | 2.0e-3 | 2.0e-3 |",
    ]
    topologies = real_lm_tables.real_lm_topologies().splitlines()[2:]
    assert topologies == [
        "| 0 | ring | striped | 1.0e-3 |  |  |",
        "| 0 | ring | in order, `allocate_bits` | 1.0e-3 |  |  |",
        "| 150 | ring | striped | 2.0e-3 |  |  |",
    ]


def test_time_to_accuracy_counts_steps_and_what_never_gets_there():
    runs = {  # losses after 0, 10 and 20 steps, and seconds of a step
        "dynamiq:5": ((3.0, 2.02, 1.01), 1.0),
        "exact": ((3.0, 2.0, 1.0), 3.0),
        "bf16": ((3.0, 2.0, 1.0), 2.0),
        "mxfp4": ((3.0, 2.5, 2.0), 1.0),
    }
    rows = {}
    for name, (held_out, step) in runs.items():
        run = {"method": name, "held_out": dict(zip(("0", "10", "20"), held_out, strict=True))}
        rows[name] = time_to_accuracy.result(run, rate=1e9, step=step, target=1.02)
    assert rows["exact"]["steps_to_target"] == pytest.approx(19.8)
    assert rows["exact"]["seconds_to_target"] == pytest.approx(59.4)
    assert rows["dynamiq:5"]["seconds_to_target"] == pytest.approx(10 + 10 * 1.0 / 1.01)
    assert rows["mxfp4"]["seconds_to_target"] is None
    text = shown(time_to_accuracy.as_table({"target": 1.02, "rows": list(rows.values())}))
    ours = 10 + 10 / 1.01
    assert f"{59.4 / ours:.2f}x" in text and f"{39.6 / ours:.2f}x" in text
    assert text.count("not reached") == 1


def test_the_target_is_that_of_the_exact_run(tmp_path):
    """In whatever order the runs are."""
    runs = [RUN | {"method": "bf16", "held_out": {"0": 3.0, "150": 1.0}}, RUN]
    assert time_to_accuracy.target_of(runs, tmp_path) == pytest.approx(3.0 - 0.99 * 0.5)
    with pytest.raises(SystemExit, match=r"no exact run of seed 0\. Run .* --methods exact"):
        time_to_accuracy.target_of(runs[:1], tmp_path)
