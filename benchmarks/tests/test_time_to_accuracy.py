"""The benchmark of time to accuracy: what it makes of runs, what it refuses, and one tiny run."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
import tyro

from benchmarks.tests.support.emulation import emulates
from benchmarks.training import time_to_accuracy
from benchmarks.training.emulated_training import report
from benchmarks.training.emulated_training.run import EmulatedRun, check_identical
from benchmarks.training.emulated_training.target import reached, target_loss
from dynamiq_jax._console.errors import CommandError

COST = {"bits": 1.0, "bytes_per_worker": 1e6, "bytes_a_step": 1e6}
COSTS = dict.fromkeys(("psum", "bf16", "dynamiq"), COST)


def make_run(setting: str, losses: list[float], step_seconds: float, rate: float = 1e8):
    """A run of three evaluations, ten steps apart."""
    steps = (0, 10, 20)
    return EmulatedRun(
        setting=setting,
        seed=0,
        rate=rate,
        host_seconds=[(0.5 * step_seconds, step_seconds)] * 20,
        checksums=dict.fromkeys(steps, 7),
        losses=dict(zip(steps, losses, strict=True)),
        accuracies=dict.fromkeys(steps, 0.1),
    )


def test_target_is_reached_on_the_line_between_evaluations():
    target = target_loss([5.0, 4.0, 4.5], 0.9)  # the lowest, not the last
    assert target == pytest.approx(4.1)
    assert reached([0, 10, 20], [5.0, 4.0, 4.5], target) == pytest.approx(9.0)
    assert reached([0, 10, 20], [5.0, 5.5, 4.0], target) == pytest.approx(19.0)  # from the lowest
    assert reached([0, 10, 20], [5.0, 4.2, 4.11], target) is None
    assert reached([0, 10, 20], [5.0, float("nan"), float("nan")], target) is None
    assert reached([0, 10], [4.0, 3.0], target) == 0


def test_summary_tells_how_much_sooner_and_what_was_not_reached(tmp_path):
    runs = [
        make_run("psum", [5.0, 4.0, 4.0], 0.6),
        make_run("bf16", [5.0, 4.0, 4.0], 0.3),
        make_run("dynamiq", [5.0, 4.5, 4.1], 0.1),
    ]
    results = report.summary(runs, COSTS, 0.05)
    exact, bf16, dynamiq = results["links"]
    assert exact["to_target"][0.99] == pytest.approx({"seconds": 5.94, "steps": 9.9})
    assert exact["times_sooner"] == {"bf16": pytest.approx({0.99: 0.5, 0.995: 0.5}), "mxfp8": {}}
    assert bf16["times_sooner"]["bf16"] == {}  # itself
    assert dynamiq["to_target"][0.99] == {"seconds": None, "steps": None}
    assert dynamiq["times_sooner"]["bf16"] == {}
    assert dynamiq["compute_share"] == pytest.approx(0.5)
    assert dynamiq["wire_seconds"] == pytest.approx(0.08)
    assert results["final_losses"][2]["mean_off"] == pytest.approx(4.1 / 4.0 - 1)
    assert len(report.as_tables(results)) == 2
    report.plot(results).savefig(tmp_path / "plot.png")
    json.dumps(results)


def test_a_link_that_changes_bits_is_an_error():
    run = make_run("psum", [5.0, 4.0, 4.0], 0.6)
    slower = dataclasses.replace(run, rate=1e7)
    check_identical([run, slower, dataclasses.replace(run, seed=1, checksums={0: 1, 10: 1, 20: 1})])
    with pytest.raises(CommandError, match="psum, seed 0: parameters after 10 steps depend"):
        check_identical([run, dataclasses.replace(slower, checksums={0: 7, 10: 6, 20: 6})])


@emulates
@pytest.mark.slow
def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    text = np.random.default_rng(0).integers(1024, size=2000, dtype=np.int32)
    corpora = types.SimpleNamespace(
        vocabulary=1024, source_code=text, reference=text, held_out=text[:200]
    )
    monkeypatch.setattr(time_to_accuracy, "load_corpora", lambda: corpora)
    output = tmp_path / "result.json"
    options = "--hosts 2 --steps 2 --eval-every 1 --rates 500mbit 1gbit --seeds 0 1"
    options += " --settings psum bf16:ring ef+bf16:ring bf16:ring@6x3"
    options += " --width 16 --layers 1 --context 16 --pretrain-steps 1"
    config = tyro.cli(time_to_accuracy.Config, args=[*options.split(), "--output", str(output)])
    # The suite is stricter than JAX is for its users.
    with jax.numpy_dtype_promotion("standard"):
        time_to_accuracy.main(config)
    assert "500 Mbit/s: time until the exact run's target" in capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    names = "psum", "bf16:ring", "ef+bf16:ring", "bf16:ring@6x3"
    assert [(row["rate"], row["setting"]) for row in results["links"]] == [
        (rate, name) for rate in (5e8, 1e9) for name in names
    ]
    for row in results["links"]:
        clock = list(row["seconds"].values())
        assert clock[0] == 0 < clock[1] < clock[2]
    sent = [row["bytes_per_worker"] for row in results["links"][:2]]
    assert sent[0] > 1.7 * sent[1]  # not twice: small leaves stay exact
    psum, bf16, _, local = results["curves"]
    assert local["losses"]["0"] == local["losses"]["1"] > local["losses"]["2"]
    assert results["links"][3]["bytes_a_step"] == sent[1] / 2
    assert list(psum["losses"]) == ["0", "1", "2"]
    assert psum["losses"]["0"] == bf16["losses"]["0"] > psum["losses"]["2"]
    for row in results["final_losses"]:
        assert set(row["losses"]) == {"0", "1"} and abs(row["mean_off"]) < 0.02
    assert max(abs(row["mean_off"]) for row in results["final_losses"][:3]) < 1e-3
    assert output.with_suffix(".png").stat().st_size > 10_000
