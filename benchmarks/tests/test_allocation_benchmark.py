"""`benchmarks.error.allocation`: the tensors that it measures on, and its tables."""

import dataclasses
import functools
import json
import types

import jax
import numpy as np
import pytest

from benchmarks.error import allocation, tensors
from benchmarks.error.allocation import Config, verdict
from benchmarks.error.tensors import ROW, Recipe, load, make, names_of
from benchmarks.training.small_lm.model import ModelConfig
from examples.tools.small_decoder import small_config

SMALL = Recipe(workers=4, size=40 * ROW, steps=(0, 1), pretrain_steps=1, local_steps=2)
DRAWN = ("white noise", "student t noise", "sparse embedding")


def test_drawn_tensors_of_first_workers_do_not_depend_on_their_number(tmp_path):
    fewer = dataclasses.replace(SMALL, workers=2)
    folders = [make(recipe, tmp_path, DRAWN) for recipe in (SMALL, fewer)]
    for name in DRAWN:
        first, second = (load(folder, name, 2) for folder in folders)
        assert (first.shape, first.dtype) == ((2, SMALL.size), np.float32)
        np.testing.assert_array_equal(first, second)
        assert np.any(first[0] != first[1])


def test_only_the_chosen_tensors_are_made_and_only_once(tmp_path):
    made: list[str] = []
    for _ in range(2):
        folder = make(SMALL, tmp_path, DRAWN, made.append)
    assert made == list(DRAWN)
    assert len(list(folder.iterdir())) == len(DRAWN)


def test_95_percent_of_the_rows_of_the_sparse_embedding_are_zero_for_all(tmp_path):
    folder = make(SMALL, tmp_path, ["sparse embedding"])
    rows = load(folder, "sparse embedding", 4).reshape(4, -1, ROW)
    assert np.mean(np.any(rows != 0, axis=(0, 2))) == pytest.approx(0.05)


NAMES = ("model.embed_tokens", "layers.0.self_attn.q", "layers.0.mlp.up", "layers.1.mlp.up")


def real_gradients(folder, text, *, workers, **_):
    """Gradients that are constant in each tensor, with rows of 300."""
    for worker in range(workers):
        yield {
            name: np.full((rows, 300), 100 * place + 0.5 * worker, np.float32)
            for place, (name, rows) in enumerate(zip(NAMES, (64, 32, 16, 16), strict=True))
        }


def test_tensors_of_a_real_model_have_a_share_of_each_tensor_of_their_kind(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(tensors, "worker_gradients", real_gradients)
    recipe = Recipe(workers=3, size=16 * ROW, model=tmp_path / "model")
    names = names_of(recipe)
    assert names == [f"model {kind}" for kind in ("gradient", "embedding", "attention", "mlp")]
    folder = make(recipe, tmp_path, names)
    for name, places in zip(names, ([0, 1, 2, 3], [0], [1], [2, 3]), strict=True):
        values, counts = np.unique(load(folder, name, 2)[0], return_counts=True)
        assert values.tolist() == [100.0 * place for place in places]
        in_model = np.array([(64, 32, 16, 16)[place] for place in places])
        np.testing.assert_allclose(counts / counts.sum(), in_model / in_model.sum(), atol=1 / 16)
        np.testing.assert_array_equal(load(folder, name, 3)[2] - load(folder, name, 3)[0], 1.0)
    # Other weights in the same folder are another model.
    (tmp_path / "model" / "model.safetensors").write_text("")
    assert make(recipe, tmp_path, names) != folder


@pytest.mark.slow
def test_trained_tensors_differ_between_workers_and_steps(tmp_path, monkeypatch):
    text = np.random.default_rng(0).integers(64, size=2000, dtype=np.int32)
    corpora = types.SimpleNamespace(vocabulary=64, source_code=text, reference=text)
    monkeypatch.setattr(tensors, "load_corpora", lambda: corpora)
    monkeypatch.setattr(tensors, "ModelConfig", functools.partial(ModelConfig, width=32, layers=1))
    config = dataclasses.replace(small_config(64), layers=1, width=64, mlp_width=64, head_dim=16)
    monkeypatch.setattr(tensors, "small_config", lambda vocabulary: config)
    chosen = [name for name in names_of(SMALL) if name not in DRAWN]
    assert len(chosen) == 6
    # The suite is stricter than JAX is for its users.
    with jax.numpy_dtype_promotion("standard"):
        folder = make(SMALL, tmp_path, chosen)
    found = [load(folder, name, 4) for name in chosen]
    distinct = np.unique(np.concatenate(found), axis=0)
    assert len(distinct) == 4 * len(chosen)
    weights, changes = (load(folder, f"local {what}", 4) for what in ("weights", "changes"))
    np.testing.assert_allclose(weights - changes, (weights - changes)[:1].repeat(4, 0), atol=1e-6)


@pytest.mark.slow
def test_tables_compare_errors_of_the_same_tensor_and_bits(tmp_path, monkeypatch, capsys):
    """White noise of two workers, for which BlockInt of 4 bits has an error of about 2 %."""
    reference = {"tensor": "white noise", "topology": "ring", "workers": 2, "bits": 6.0}
    content = {"config": {"recipe": dataclasses.asdict(SMALL)}}
    path = tmp_path / "fitted.json"
    path.write_text(json.dumps(content | {"results": [reference | {"vnmse": 0.5}]}))
    monkeypatch.setattr(allocation, "FITTED", path)
    config = Config(
        bits=(6.0,),
        workers=(2,),
        code_bits=(4,),
        mxfp4_bits=(6.0,),
        other_workers=(2,),
        topologies=("ring",),
        tensors=("white noise",),
        recipe=SMALL,
        folder=tmp_path,
        output=tmp_path / "allocation.json",
    )
    assert allocation.main(config) == 0
    written = json.loads(config.output.read_text())["results"]
    against = (written[f"against_{name}"] for name in ("fitted", "blockint", "mxfp4"))
    (fitted,), (blockint,), (mxfp4,) = against
    assert fitted["vnmse"]["dynamiq"] == mxfp4["vnmse"]["dynamiq"]
    assert fitted["ratios"] == {"to fitted": fitted["vnmse"]["dynamiq"] / 0.5}
    errors, ratios = blockint["vnmse"], blockint["ratios"]
    assert blockint["bits"] == 4.5
    assert 0.015 < errors["blockint"] < 0.04
    assert ratios["unbiased"] == errors["dynamiq"] / errors["blockint"]
    assert ratios["nearest"] == errors["dynamiq nearest"] / errors["blockint nearest"]
    assert "better" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [((0.5, 0.97), "better"), ((0.5, 0.99), "equal"), ((0.5, 1.03), "worse"), ((None,), "")],
)
def test_verdict_is_of_the_highest_ratio(ratios, expected):
    assert verdict({str(index): ratio for index, ratio in enumerate(ratios)}, 0.02) == expected
