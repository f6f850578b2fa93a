"""The search of a bucket size, the time of a step, and the command."""

import json
import math
import sys

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.speed.tune_buckets.command import TuneBuckets
from benchmarks.speed.tune_buckets.tuner import BucketTrial, StepTimer, tune_bucket_bytes

MIB = 2**20


class Clock:
    """A clock that only steps move: by 1 s, but for some, of which the first compiles."""

    def __init__(self, extra: dict[int, float]):
        self.now, self.steps, self.extra = 100.0, 0, extra

    def __call__(self) -> float:
        return self.now

    def step(self):
        self.now += 1 + self.extra.get(self.steps, 0)
        self.steps += 1
        return jnp.zeros(())


def curve(best: float, steepness: float = 1.0):
    """A convex function of the logarithm of a size, as latency and overlap make one."""
    return lambda size: 1 + steepness * (math.log2(size) - math.log2(best)) ** 2


def test_the_time_of_a_step_is_a_median_of_warm_ones():
    clock = Clock({0: 60.0, 1: 5.0, 3: 9.0, 5: 2.0})
    assert StepTimer(clock=clock)(clock.step) == 1.0
    assert clock.steps == 7
    clock = Clock({0: 60.0})
    assert StepTimer(warmup=0, steps=1, clock=clock)(clock.step) == 61.0


@given(
    best=st.floats(0.2, 600).map(lambda mib: mib * MIB),
    steepness=st.floats(0.01, 100),
    rounds=st.integers(0, 3),
)
def test_the_best_size_of_a_convex_curve_is_found(best, steepness, rounds):
    """It is as close as the grid is fine, and closer after each round; limits are kept."""
    trials = tune_bucket_bytes(curve(best, steepness), rounds=rounds)
    sizes = [trial.bucket_bytes for trial in trials]
    assert len(sizes) == len(set(sizes)) == 8 + rounds
    assert min(sizes) == MIB and max(sizes) == 128 * MIB
    assert [trial.seconds for trial in trials] == sorted(curve(best, steepness)(s) for s in sizes)
    wanted = min(max(best, MIB), 128 * MIB)
    # Neighbors on the grid are an octave apart; a probe cuts the wider interval at 0.38.
    octaves = abs(math.log2(sizes[0]) - math.log2(wanted))
    assert octaves <= (0.5, 0.2, 0.2, 0.2)[rounds] + 1e-3


def test_sizes_are_tried_in_order_and_once():
    asked = []

    def seconds_of(size):
        asked.append(size)
        return curve(11 * MIB)(size)

    trials = tune_bucket_bytes(seconds_of)
    assert asked[:8] == [2**power * MIB for power in range(8)]
    assert all(8 * MIB < size < 16 * MIB for size in asked[8:]) and len(asked) == 10
    assert sorted(asked) == sorted(trial.bucket_bytes for trial in trials)
    # Of a flat curve, the first one; a limit of few sizes is not tried twice.
    assert tune_bucket_bytes(lambda _: 1.0)[0] == BucketTrial(MIB, 1.0)
    assert len(tune_bucket_bytes(lambda _: 1.0, low=4, high=6)) == 3


# ----------------------------------------------------------------------------------- the command

MODULE = """
import time
import jax.numpy as jnp

def make_step(bucket_bytes):
    def step():
        time.sleep(abs(bucket_bytes - 4 * 2**20) / 2**20 * 2e-3)
        return jnp.zeros(())
    return step

def no_step(bucket_bytes):
    return 3

not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "steps_of_a_user.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("steps_of_a_user", None)


def test_the_command_measures_a_users_step(folder, capsys):
    paths = {"json": folder / "tuned.json", "plot": folder / "tuned.png"}
    options = {"low": "1Mi", "high": "16Mi", "candidates": 5, "rounds": 1, "warmup": 0, "steps": 1}
    assert TuneBuckets("steps_of_a_user:make_step", **options, **paths).run() == 0
    shown = capsys.readouterr().out
    found = json.loads(paths["json"].read_text())
    trials = found["results"]["trials"]
    assert len(trials) == 6 and {1, 2, 4, 8, 16} <= {t["bucket_bytes"] / MIB for t in trials}
    assert [t["seconds"] for t in trials] == sorted(t["seconds"] for t in trials)
    assert found["config"]["step"] == "steps_of_a_user:make_step"
    assert f"dq.Compression(bucket_bytes={trials[0]['bucket_bytes']})" in shown
    assert "16 MiB" in shown and "best" in shown
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")
