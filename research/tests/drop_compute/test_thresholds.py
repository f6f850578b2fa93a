"""The model of a compute threshold, its law, and the command that predicts its gain."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamiq_jax._console.errors import CommandError
from dynamiq_research import StragglerLaw, choose_threshold, effect_of_threshold
from dynamiq_research.drop_compute import prediction as predictions
from dynamiq_research.drop_compute.command import Predict
from dynamiq_research.drop_compute.prediction import MadeUp, Rule


def latencies(steps=30, workers=16, micro_batches=6, sigma=0.5, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(sigma=sigma, size=(steps, workers, micro_batches))


def step_by_step(times, rest, threshold, min_done, in_flight, cut):
    """(speed-up, drop rate) of workers that are followed one micro-batch after the other."""
    done, seconds, before = 0, 0.0, 0.0
    for step in times:
        ends, all_ends = [], []
        for worker in step:
            elapsed, count = [0.0], 0
            for index, latency in enumerate(worker):
                known = elapsed[max(0, index - in_flight)]  # that the worker has waited for
                if not cut and index >= min_done and index > in_flight and known >= threshold:
                    break
                if cut and elapsed[-1] + latency >= threshold:
                    elapsed.append(threshold)
                    break
                elapsed.append(elapsed[-1] + latency)
                count += 1
            done += count
            ends.append(elapsed[-1])
            all_ends.append(sum(worker))
        seconds += max(ends) + rest
        before += max(all_ends) + rest
    kept = done / times.size
    return kept * before / seconds, 1 - kept


@given(
    seed=st.integers(0, 99),
    threshold=st.one_of(st.floats(0, 8), st.just(np.inf)),
    min_done=st.integers(1, 6),
    in_flight=st.integers(0, 3),
    cut=st.booleans(),
)
def test_the_effect_is_that_of_following_every_worker(seed, threshold, min_done, in_flight, cut):
    times = latencies(3, 4, 5, seed=seed)
    options = {"min_done": min_done, "in_flight": in_flight, "cut": cut}
    found = effect_of_threshold(times, 0.3, threshold, **options)
    speedup, dropped = step_by_step(times, 0.3, threshold, **options)
    np.testing.assert_allclose(found.speedup, speedup, rtol=1e-12)
    np.testing.assert_allclose(found.drop_rate, dropped, atol=1e-12)


@given(seed=st.integers(0, 99), workers=st.integers(1, 5), cut=st.booleans())
def test_no_threshold_has_no_effect(seed, workers, cut):
    times = latencies(2, workers, 3, seed=seed)
    found = effect_of_threshold(times, 0.1, np.inf, cut=cut)
    assert (found.speedup, found.drop_rate) == (1, 0)
    assert found.step_seconds == found.step_seconds_before
    np.testing.assert_allclose(found.step_seconds, times.sum(-1).max(-1).mean() + 0.1)


def test_more_is_dropped_and_steps_are_shorter_with_a_lower_threshold():
    times = latencies()
    effects = [effect_of_threshold(times, 0.5, tau) for tau in np.linspace(0.1, 14, 40)]
    for name, sign in (("drop_rate", -1), ("step_seconds", 1)):
        values = sign * np.array([getattr(effect, name) for effect in effects])
        assert (np.diff(values) >= 0).all() and values[0] < values[-1]


@pytest.mark.parametrize("max_drop", (0.02, 0.1, 1.0))
@pytest.mark.parametrize("rule", ({}, {"in_flight": 1}, {"min_done": 4}), ids=str)
def test_the_chosen_threshold_is_the_best_of_a_finer_search(max_drop, rule):
    times = latencies()
    chosen = choose_threshold(times, 0.5, max_drop=max_drop, **rule)
    assert chosen == effect_of_threshold(times, 0.5, chosen.threshold, **rule)
    assert chosen.drop_rate <= max_drop and chosen.speedup > 1
    finer = [effect_of_threshold(times, 0.5, tau, **rule) for tau in np.linspace(0.5, 15, 1500)]
    best = max(effect.speedup for effect in finer if effect.drop_rate <= max_drop)
    assert best * 0.99 < chosen.speedup <= best * 1.005


def test_no_threshold_is_chosen_where_none_helps():
    assert choose_threshold(np.ones((4, 8, 5)), 0.2).threshold == np.inf
    assert choose_threshold(latencies(workers=1), 0.0).threshold == np.inf
    assert choose_threshold(latencies(), 0.0, max_drop=0.0).drop_rate == 0


def test_the_rest_of_a_step_counts_by_step():
    times = latencies(2, 3, 4)
    found = effect_of_threshold(times, [0.0, 1.0], 3.0)
    assert found.speedup == pytest.approx(effect_of_threshold(times, 0.5, 3.0).speedup)
    assert found.speedup < effect_of_threshold(times, 0.0, 3.0).speedup


@pytest.mark.parametrize(
    "arguments, message",
    (
        ((np.ones((3, 4)), 0.1, 1.0), "times has shape"),
        ((np.zeros((1, 1, 2)), 0.1, 1.0), "take no time"),
        ((-np.ones((1, 1, 2)), 0.1, 1.0), "times holds -1.0"),
        ((np.full((1, 1, 2), np.nan), 0.1, 1.0), "times holds nan"),
        ((np.ones((1, 1, 2)), np.inf, 1.0), "rest holds inf"),
        ((np.ones((1, 1, 2)), [0.1, 0.1], 1.0), "rest has shape"),
        ((np.ones((1, 1, 2)), 0.1, -1.0), "threshold=-1.0"),
    ),
)
def test_impossible_tables_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        effect_of_threshold(*arguments)


# ----------------------------------------------------------------------------------------- the law

NORMAL = MadeUp(noise="normal", workers=200, micro_batches=12, mean=0.45, deviation=0.3, rest=0.3)
LAW = StragglerLaw(mean=0.45, deviation=0.135, micro_batches=12, workers=200, rest=0.3)


@pytest.mark.parametrize("cut", (False, True), ids=("checked between", "cut off"))
@pytest.mark.slow
def test_normal_latencies_of_200_workers_follow_the_law(cut):
    """To 1%. The law of 8 workers is another one."""
    drawn = NORMAL.draw(steps=120, seed=0)
    for threshold in (4.0, 4.7, 5.4, 6.0):
        found = effect_of_threshold(*drawn, threshold, cut=cut)
        assert found.speedup == pytest.approx(LAW.speedup(threshold, cut=cut), rel=0.01)
        done = 12 * (1 - found.drop_rate)
        assert done == pytest.approx(LAW.completed(threshold, cut=cut), rel=0.002)
        after = LAW.accumulation(threshold, cut=cut) + 0.3
        assert found.step_seconds == pytest.approx(after, rel=0.01)
    few = dataclasses.replace(LAW, workers=8)
    found = effect_of_threshold(*drawn, 4.7, cut=cut)
    assert abs(few.speedup(4.7, cut=cut) / found.speedup - 1) > 0.02


def test_the_last_of_many_workers_ends_a_micro_batch_after_the_threshold():
    """A single worker overruns by half of one; so the speed-up is far below the paper's."""
    one = [effect_of_threshold(*dataclasses.replace(NORMAL, workers=1).draw(400, 0), 4.0)]
    assert one[0].step_seconds - 0.3 - 4.0 == pytest.approx(0.45 / 2, rel=0.2)
    assert 1.4 < (LAW.accumulation(4.0) - 4.0) / 0.45 < 2
    assert LAW.speedup(4.7, cut=True) - LAW.speedup(4.7) > 0.04


def test_the_time_without_a_threshold_grows_with_the_logarithm_of_workers():
    for workers in (8, 64, 1024):
        law = dataclasses.replace(LAW, workers=workers)
        assert law.longest == pytest.approx(law.accumulation(np.inf), rel=0.01)
        assert law.speedup(np.inf) == pytest.approx(1)
        # sqrt(2 log n) deviations, less a little
        beyond = (law.longest - 12 * 0.45) / (0.135 * np.sqrt(12)) / np.sqrt(2 * np.log(workers))
        assert 0.65 < beyond < 1


@pytest.mark.parametrize(
    "field, value",
    (("mean", 0.0), ("deviation", -1.0), ("workers", 1), ("micro_batches", 0), ("rest", -0.1)),
)
def test_impossible_laws_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        dataclasses.replace(LAW, **{field: value})


# ------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("noise", ("normal", "lognormal", "exponential"))
def test_made_up_latencies_have_the_moments_that_were_asked_for(noise):
    made_up = dataclasses.replace(NORMAL, noise=noise, mean=2.0, deviation=0.25)
    times, rest = made_up.draw(steps=50, seed=1)
    assert times.shape == (50, 200, 12) and (rest == 0.3).all()
    assert times.mean() == pytest.approx(2.0, rel=0.01)
    assert times.std() == pytest.approx(0.5, rel=0.05)
    assert times.min() >= 0
    skewed = ((times - times.mean()) ** 3).mean() / times.std() ** 3
    assert (abs(skewed) < 0.1) == (noise == "normal")
    other = made_up.draw(steps=50, seed=2).times
    assert not np.array_equal(times, other)


def test_a_prediction_is_checked_on_steps_that_it_was_not_chosen_from():
    drawn = dataclasses.replace(NORMAL, workers=30).draw(steps=40, seed=3)
    found = predictions.predict(drawn, Rule())
    halves = [(drawn.times[part], drawn.rest[part]) for part in (slice(20), slice(20, None))]
    assert found.chosen == choose_threshold(*halves[0])
    assert found.held_out == effect_of_threshold(*halves[1], found.chosen.threshold)
    assert found.held_out.speedup != found.chosen.speedup
    assert found.cut == effect_of_threshold(*halves[1], found.chosen.threshold, cut=True)
    assert found.law == pytest.approx(found.held_out.speedup, rel=0.02)
    assert found.cut_law == pytest.approx(found.cut.speedup, rel=0.02)
    assert predictions.predict(drawn, Rule(in_flight=1)).law is None  # it is that of in_flight=0


def test_files_give_the_table_that_they_hold(tmp_path):
    times, rest = latencies(2, 3, 4), np.array([0.1, 0.2])
    np.savez(tmp_path / "with.npz", times=times, rest=rest)
    np.savez(tmp_path / "without.npz", times=times)
    rows = [(s, w, m, times[s, w, m]) for s in range(2) for w in range(3) for m in range(4)]
    lines = [f"{s + 5},{w + 1},{m},{t!r}" for s, w, m, t in rows]
    table = "\n".join(["step,worker,micro_batch,seconds", *lines[::-1]]).replace("np.float64", "")
    (tmp_path / "rows.csv").write_text(table.replace("(", "").replace(")", ""))
    for name, expected in (("with.npz", rest), ("without.npz", [0.7] * 2), ("rows.csv", [0.7] * 2)):
        found = predictions.read_latencies(tmp_path / name, rest=0.7)
        np.testing.assert_array_equal(found.times, times)
        np.testing.assert_array_equal(found.rest, expected)


@pytest.mark.parametrize(
    "name, content, message",
    (
        ("none.npz", None, "No such file"),
        ("bad.txt", "", "neither .npz nor .csv"),
        ("bad.npz", {"latencies": np.ones(3)}, "no `times`"),
        ("flat.npz", {"times": np.ones((3, 2))}, "times has shape"),
        ("bad.csv", "a,b\n1,2\n3,4", "its columns are"),
        ("few.csv", "step,worker,micro_batch,seconds\n0,0,0,1\n1,1,0,1", "give each of them once"),
    ),
)
def test_other_files_are_refused(tmp_path, name, content, message):
    if isinstance(content, dict):
        np.savez(tmp_path / name, **content)
    elif content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CommandError, match=message):
        Predict(latencies=tmp_path / name).run()


@pytest.mark.slow
def test_the_command_predicts_and_says_that_it_simulates(tmp_path, capsys):
    paths = {"json": tmp_path / "found.json", "plot": tmp_path / "plot.png"}
    command = Predict(workers=20, micro_batches=6, steps=20, noise="normal", **paths)
    assert command.run() == 0
    shown = capsys.readouterr().out
    assert "20 workers, 6 micro-batches a step, 20 steps: normal latencies, simulated" in shown
    results = json.loads(paths["json"].read_text())["results"]
    prediction = results["prediction"]
    assert f"{prediction['held_out']['speedup']:.3f}x" in shown
    assert f"{prediction['law']:.3f}x" in shown
    best = max(row["speedup"] for row in results["sweep"])
    assert 1 < prediction["held_out"]["speedup"] <= best * 1.01
    assert [row["speedup"] for row in results["sweep"]][-1] == 1
    assert paths["plot"].stat().st_size > 10_000


def test_the_command_says_when_not_to(capsys):
    assert Predict(workers=4, micro_batches=3, steps=6, deviation=0.0).run() == 0
    shown = capsys.readouterr().out
    assert "No threshold helps" in shown and "none" in shown


@pytest.mark.parametrize(
    "options, message",
    (
        ({"workers": 0}, "--workers is 0"),
        ({"micro_batches": 0}, "--micro-batches is 0"),
        ({"steps": 1}, "--steps is 1"),
        ({"mean": 0.0}, "--mean is 0"),
        ({"deviation": 1.4}, "deviation=1.4.*at most 1.31 with lognormal"),
        ({"rest": -1.0}, "--rest is -1"),
        ({"max_drop": 2.0}, "--max-drop is 2"),
        ({"min_done": 0}, "--min-done is 0"),
        ({"in_flight": -1}, "--in-flight is -1"),
        ({"seed": -1}, "--seed is -1"),
    ),
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(CommandError, match=message):
        Predict(**options).run()
