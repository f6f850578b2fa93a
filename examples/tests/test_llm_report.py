"""The report of the fine-tuning example: its table, its predictions and its plot."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax._prediction.advice import Question, predictions
from dynamiq_jax._prediction.cost_model import Network
from examples.llm import plot, report
from examples.llm.prediction import predicted_seconds
from examples.llm.recipe import Recipe
from examples.tests.support import llm_files

EXACT = Recipe(steps=3, learning_rate=1e-2)
COMPRESSED = Recipe(method="dynamiq:5", steps=3, learning_rate=1e-2)
RECIPES = {recipe.name: recipe for recipe in (EXACT, COMPRESSED)}
STEPS = [
    {"step": 0, "evaluation_loss": 8.0},
    {"step": 1, "loss": 8.1, "seconds": 9.0, "bytes": 1_000_000},
    {"step": 2, "loss": 6.0, "seconds": 0.2, "bytes": 1_000_000},
    {"step": 3, "loss": 4.0, "seconds": 0.2, "bytes": 1_000_000, "evaluation_loss": 5.0},
]


def cells(text):
    """Rows of a table in Markdown by their first cell."""
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_table_has_the_numbers_of_each_run():
    other = [record | {"error": 0.001} for record in STEPS]
    other[-1] = other[-1] | {"bytes": 160_000, "evaluation_loss": 5.1}
    predicted = {"exact": {"1 Gbit/s": 1.5}, "dynamiq:5:ring": {"1 Gbit/s": 0.5}}
    text = report.table({"exact": STEPS, "dynamiq:5:ring": other}, predicted)
    found = cells(text)
    assert text.splitlines()[0].startswith("|  ") and "exact | dynamiq:5:ring |" in text
    assert found["held-out loss before"] == ["8.0000", "8.0000"]
    assert found["held-out loss"] == ["5.0000", "5.1000"]
    assert found["training loss, last 20 steps"] == ["6.0333", "6.0333"]
    assert found["bytes sent a step by each device"] == ["1,000,000", "160,000"]
    assert found["estimated vNMSE of the mean"] == ["", "1.0e-03"]
    # The first step, which compiles, does not count.
    assert found["time a step, measured here"] == ["200 ms", "200 ms"]
    assert found["time a step, predicted at 1 Gbit/s"] == ["1.5 s", "500 ms"]
    assert len({line.count("|") for line in text.splitlines()}) == 1


@pytest.mark.parametrize(("device", "links"), (("cpu", (0.1, 1, 10)), ("gpu", (10, 100, 400))))
@pytest.mark.parametrize("topology", ["ring", "all_to_all"])
def test_predictions_are_those_of_advise(device, links, topology):
    asked = {"size": 1_000_000, "workers": 8, "computing": 0.25, "device": device}
    ours = Recipe(method="dynamiq:5", topology=topology, steps=3, learning_rate=1e-2)
    for link in links:
        question = Question(
            network=Network(gbit_per_s=link),
            size=1_000_000,
            workers=8,
            step_seconds=0.25,
            overlap=0.0,
            gradient="f32",
            device=device,
            codec_ns=None,
            methods=(dq.DynamiQ(),),
        )
        plain, *compressed = predictions(question)
        expected = {"exact": plain.step}
        expected["dynamiq"] = next(o.step for o in compressed if o.topology == topology)
        for name, recipe in (("exact", EXACT), ("dynamiq", ours)):
            seconds = predicted_seconds(recipe, **asked)
            assert len(seconds) == 3
            at = f"{link:g} Gbit/s" if link >= 1 else f"{1000 * link:g} Mbit/s"
            assert seconds[at] == pytest.approx(expected[name], rel=1e-9)


def task_on(workers, rows=7):
    """A task with a million parameters on virtual devices."""
    return SimpleNamespace(
        mesh=llm_files.mesh_of(workers),
        shapes={"w": jax.ShapeDtypeStruct((1000, 1000), "float32")},
        model="tiny in float32",
        batch=2,
        rows=SimpleNamespace(tokens=np.zeros((rows, 64))),
    )


def test_workers_of_one_machine_are_predicted_on_machines_of_their_own():
    text = report.text(task_on(4), RECIPES, dict.fromkeys(RECIPES, STEPS))
    assert "tiny in float32. Workers: 4. Steps: 3, of 8 rows of 64 tokens each." in text
    assert "50 ms of computing (1/4 of the exact step here)" in text
    assert "no bytes cross a link" in text
    expected = predicted_seconds(EXACT, size=10**6, workers=4, computing=0.05, device="cpu")
    assert len(expected) == 3
    for link, seconds in expected.items():
        exact, compressed = cells(text)[f"time a step, predicted at {link}"]
        assert exact == report.format_seconds(seconds) != compressed


def test_one_worker_has_nothing_to_predict():
    text = report.text(task_on(1), {"exact": EXACT}, {"exact": STEPS})
    assert "redicted" not in text and "link" not in text


@pytest.mark.parametrize("count", [1, 2])
def test_the_plot_shows_every_loss(count, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda _, *args, **style: drawn.append(args))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_, **__: None)
    names = list(RECIPES)[-count:]
    plot.plot_losses(tmp_path / "losses.png", dict.fromkeys(names, STEPS))
    expected = [([1, 2, 3], [8.1, 6.0, 4.0]), ([0, 3], [8.0, 5.0], "o")]
    assert drawn == expected * count
    assert (tmp_path / "losses.png").stat().st_size > 1000
