"""DropCompute: who does how many micro-batches, and the mean over those that were done."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType

import dynamiq_jax as dq
from dynamiq_jax.methods import ErrorFeedback
from dynamiq_research.drop_compute import (
    Calibration,
    DropCompute,
    Latencies,
    SimulatedClock,
    choose_threshold,
    effect_of_threshold,
)
from dynamiq_research.drop_compute.accumulation import wall_clock
from dynamiq_research.drop_compute.thresholds import replay
from research.tests.support import drop_compute_worker as worker
from tests.support import processes
from tests.support.gradients import vnmse
from tests.support.workers import STOCHASTIC

WORKERS, MICRO_BATCHES, STEPS, ROWS = 4, 5, 3, 2
INPUTS, OUTPUTS = 40, 32
slow = pytest.mark.slow


def table(seed=0, steps=STEPS, workers=WORKERS) -> Latencies:
    random = np.random.default_rng(seed)
    times = random.lognormal(sigma=0.6, size=(steps, workers, MICRO_BATCHES))
    return Latencies(times, random.uniform(0.1, 0.3, steps))


def loss_fn(params, batch):
    error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    return jnp.sum(error * batch["mask"][:, None]) / jnp.maximum(batch["mask"].sum(), 1)


def data(seed=1, devices=WORKERS) -> list[dict[str, np.ndarray]]:
    """Micro-batches of one step, `ROWS` rows a device."""
    random = np.random.default_rng(seed)

    def rows():
        return {
            "x": random.standard_normal((ROWS * devices, INPUTS)).astype(np.float32),
            "y": random.standard_normal((ROWS * devices, OUTPUTS)).astype(np.float32),
            "mask": np.ones(ROWS * devices, np.float32),
        }

    return [rows() for _ in range(MICRO_BATCHES)]


def params() -> dict[str, np.ndarray]:
    return {"w": np.linspace(-1, 1, INPUTS * OUTPUTS, dtype=np.float32).reshape(INPUTS, OUTPUTS)}


@pytest.fixture
def make(data_mesh):
    """`make(**fields)`: a step of four workers, by default exact SGD of rate 1 on `table()`."""

    def drop_compute(**fields) -> DropCompute:
        default = {
            "loss_fn": loss_fn,
            "optimizer": optax.sgd(1.0),
            "mesh": data_mesh(WORKERS),
            "axis_name": "data",
            "method": "exact",
            "devices_per_worker": 1,
            "clock": SimulatedClock(table()),
        }
        return DropCompute(**default | fields)

    return drop_compute


def gradient_of(batch, device) -> np.ndarray:
    """Gradient of the loss at `params()` on the rows of a device, float64."""
    x, y, mask = (
        batch[name][device * ROWS :][:ROWS].astype(np.float64) for name in ["x", "y", "mask"]
    )
    return 2 * x.T @ ((x @ params()["w"] - y) * mask[:, None]) / max(mask.sum(), 1)


def mean_of_done(batches, done, weight=lambda batch, device: 1.0) -> np.ndarray:
    """Mean gradient over the micro-batches that each device did."""
    total, weights = 0.0, 0.0
    for device, count in enumerate(done):
        for batch in batches[:count]:
            total = total + weight(batch, device) * gradient_of(batch, device)
            weights += weight(batch, device)
    return total / weights


# ------------------------------------------------------------------------------------- the loop


@pytest.mark.parametrize("min_done, in_flight", ((1, 0), (3, 0), (1, 1), (2, 2), (9, 0)))
def test_workers_do_as_many_micro_batches_as_the_model_replays(make, min_done, in_flight):
    latencies = table()
    elapsed = latencies.times.cumsum(-1)
    step = make(min_done=min_done, in_flight=in_flight)
    start = step.init(params()).params
    seen = set()
    for number, threshold in enumerate((0.0, *np.quantile(elapsed, (0.3, 0.5, 0.8)), np.inf)):
        found = step._accumulation.run(start, data(), threshold, number)
        row = [number % STEPS]
        expected = replay(elapsed[row], threshold, min_done, in_flight).done[0]
        np.testing.assert_array_equal(found.sums.done, expected)
        seen |= set(expected.tolist())
        if threshold == np.inf:
            np.testing.assert_allclose(found.elapsed, elapsed[row][0], rtol=1e-12)
    assert len(seen) > 1 or min_done == 9


def test_a_changed_description_records_on_its_own(make):
    first = make()
    assert dataclasses.replace(first, seed=1).recorder is not first.recorder


def test_a_micro_batch_is_not_loaded_before_its_turn(make):
    """Its time counts, and those that are dropped cost none."""
    read = []

    class Lazy(Sequence):
        def __len__(self):
            return MICRO_BATCHES

        def __getitem__(self, index):
            read.append(index)
            return data(devices=1)[index]

    class Clock:
        """A second for each micro-batch that was loaded."""

        def __call__(self, step, worker, event):
            return float(len(read))

    step = make(clock=Clock(), threshold=3.0, mesh=jax.make_mesh((1,), ("data",)))
    metrics, _ = step.step(Lazy(), step.init(params()))
    assert read == [0, 1, 2]
    assert int(metrics.done) == 3
    np.testing.assert_allclose(float(metrics.drop_rate), 2 / 5, rtol=1e-6)


def test_the_clock_follows_the_device(make):
    """It is read when a micro-batch is done, not when it is dispatched."""
    waited, read = [], []

    class Mark:
        def block_until_ready(self):
            waited.append(self)

    def clock(step, worker, event):
        read.append((event, len(waited)))
        return 0.0

    step = make(clock=clock, mesh=jax.make_mesh((1,), ("data",)))
    accumulation, start = step._accumulation, step.init(params()).params
    ((first, add),) = accumulation._programs
    vars(accumulation)["_programs"] = [(first, lambda *given: (add(*given)[0], Mark()))]
    for threshold, last in ((1.0, MICRO_BATCHES - 1), (np.inf, MICRO_BATCHES)):
        waited.clear()
        read.clear()
        accumulation.run(start, data(devices=1), threshold, 0)
        assert read == [(event, event) for event in range(last + 1)]


# -------------------------------------------------------------------------------------- the mean


@pytest.mark.parametrize("devices_per_worker", (1, 2, None), ids=str)
def test_the_update_is_the_mean_over_what_was_done(make, devices_per_worker):
    """Also if workers have several devices, which do the same number."""
    groups = WORKERS // (devices_per_worker or WORKERS)
    latencies = table(seed=4, workers=groups)
    threshold = 1.01 * float(np.median(latencies.times.cumsum(-1)[0]))
    step = make(
        devices_per_worker=devices_per_worker, clock=SimulatedClock(latencies), threshold=threshold
    )
    metrics, state = step.step(data(), step.init(params()))
    done = replay(latencies.times[:1].cumsum(-1), threshold, 1, 0).done[0]
    assert len(set(done.tolist())) > 1 or groups == 1
    assert 0 < done.sum() < groups * MICRO_BATCHES
    expected = mean_of_done(data(), np.repeat(done, WORKERS // groups))
    np.testing.assert_allclose(params()["w"] - state.params["w"], expected, rtol=1e-4, atol=1e-5)
    assert int(metrics.done) == done.sum()
    np.testing.assert_allclose(metrics.drop_rate, 1 - done.mean() / MICRO_BATCHES, atol=1e-6)
    assert float(metrics.weight) == done.sum() * WORKERS // groups
    for shard in state.params["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, state.params["w"])


@pytest.mark.parametrize("axes", (("hosts", "local"), ("local", "hosts")), ids="-".join)
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=lambda kind: kind.name)
def test_meshes_of_two_axes(make, axes, kind):
    """With a method that keeps a state. Workers are counted along the axes as they are named."""
    latencies = table(seed=4)
    threshold = 1.01 * float(np.median(latencies.times.cumsum(-1)[0]))
    mesh = jax.make_mesh((2, 2), ("hosts", "local"), (kind,) * 2, devices=jax.devices()[:4])
    step = make(
        mesh=mesh,
        axis_name=axes,
        method=dq.Compression(ErrorFeedback(inner=STOCHASTIC), exact_below=0),
        clock=SimulatedClock(latencies),
        threshold=threshold,
    )
    _, state = step.step(data(), step.init(params()))
    done = replay(latencies.times[:1].cumsum(-1), threshold, 1, 0).done[0]
    change = params()["w"].astype(np.float64) - np.asarray(state.params["w"])
    assert 1e-9 < vnmse(change, mean_of_done(data(), done)) < 1e-4


def test_weights_make_it_the_mean_over_targets(make):
    """Micro-batches have other numbers of targets; some have none."""
    batches = data()
    random = np.random.default_rng(2)
    for batch in batches:
        batch["mask"] = random.integers(0, 2, batch["mask"].shape).astype(np.float32)
    threshold = float(np.median(table().times.cumsum(-1)[0]))
    step = make(threshold=threshold, num_targets=lambda params, batch: batch["mask"].sum())
    metrics, state = step.step(batches, step.init(params()))
    done = replay(table().times[:1].cumsum(-1), threshold, 1, 0).done[0]

    def targets(batch, device):
        return batch["mask"][device * ROWS :][:ROWS].sum()

    weights = {targets(b, d) for d, n in enumerate(done) for b in batches[:n]}
    assert weights == {0, 1, 2}
    expected = mean_of_done(batches, done, targets)
    np.testing.assert_allclose(params()["w"] - state.params["w"], expected, rtol=1e-4, atol=1e-5)
    unweighted = mean_of_done(batches, done)
    assert np.abs(unweighted - expected).max() > 1e-2
    w = params()["w"].astype(np.float64)
    losses = [
        (((b["x"] @ w - b["y"]) ** 2).sum(1) * b["mask"])[d * ROWS :][:ROWS].sum()
        for d, n in enumerate(done)
        for b in batches[:n]
    ]
    np.testing.assert_allclose(metrics.loss, sum(losses) / float(metrics.weight), rtol=1e-5)


@pytest.mark.slow
def test_a_compressed_mean_has_the_error_of_its_method(make):
    threshold = float(np.median(table().times.cumsum(-1)[0]))
    step = make(threshold=threshold, method=dq.Compression("dynamiq:5", exact_below=0))
    _, state = step.step(data(), step.init(params()))
    done = replay(table().times[:1].cumsum(-1), threshold, 1, 0).done[0]
    change = params()["w"].astype(np.float64) - np.asarray(state.params["w"])
    assert 1e-5 < vnmse(change, mean_of_done(data(), done)) < 1e-2


@pytest.mark.slow
def test_gradients_are_scaled_alike_however_many_were_done(make):
    """A method with a state compares gradients of steps: their scale may not follow the number."""
    states = {}
    for threshold in (0.0, np.inf):
        step = make(threshold=threshold, method=ErrorFeedback(inner=STOCHASTIC))
        batches = [data()[0]] * MICRO_BATCHES
        _, after = step.step(batches, step.init(params()))
        states[threshold] = np.concatenate(
            [np.ravel(leaf) for leaf in jax.tree.leaves(after.all_reduce.method)]
        )
    few, many = (np.linalg.norm(state) for state in states.values())
    assert few > 0
    np.testing.assert_allclose(many, few, rtol=0.2)


def test_nothing_changes_in_a_step_without_targets(make):
    """Neither parameters nor momentum nor residuals; the next step is as if it had not been."""
    fields = {
        "optimizer": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)),
        "num_targets": lambda params, batch: batch["mask"].sum(),
        "method": ErrorFeedback(inner=STOCHASTIC),
        "threshold": np.inf,
    }
    step = make(**fields)
    _, state = step.step(data(), step.init(params()))
    before = jax.tree.map(np.array, state)
    empty = [batch | {"mask": np.zeros_like(batch["mask"])} for batch in data()]
    metrics, after = step.step(empty, state)
    assert float(metrics.weight) == 0
    for name in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    jax.tree.map(np.testing.assert_array_equal, after.all_reduce.method, before.all_reduce.method)
    assert int(after.all_reduce.step) == int(before.all_reduce.step) + 1
    _, changed = step.step(data(seed=7), after)
    assert np.abs(changed.params["w"] - before.params["w"]).max() > 1e-3


@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=lambda t: t.name)
def test_a_context_mesh_is_not_that_of_a_worker(make, axis_type):
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    step = make(mesh=mesh, devices_per_worker=None, threshold=np.inf, clock=wall_clock)
    with jax.set_mesh(mesh):
        _, state = step.step(data(), step.init(params()))
    moved = params()["w"] - state.params["w"]
    np.testing.assert_allclose(moved, mean_of_done(data(), [MICRO_BATCHES] * 4), rtol=1e-4)


def test_a_mean_over_no_targets_may_be_nan(make):
    """On one device: it has no weight."""
    batches = data()
    for batch in batches:
        batch["mask"][:ROWS] = 0

    def plain_mean(params, batch):
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        return jnp.sum(error * batch["mask"][:, None]) / batch["mask"].sum()

    step = make(
        loss_fn=plain_mean, threshold=np.inf, num_targets=lambda params, batch: batch["mask"].sum()
    )
    metrics, state = step.step(batches, step.init(params()))
    assert np.isfinite(state.params["w"]).all() and np.isfinite(metrics.loss)


def test_a_state_with_another_threshold_is_refused(make):
    state = make(threshold=2.5).init(params())
    with pytest.raises(ValueError, match=r"threshold=0\.0, but the threshold in the state is 2\.5"):
        make(threshold=0.0).step(data(), state)
    state = make(threshold=Calibration()).init(params())
    with pytest.raises(ValueError, match="none yet, which a calibration would choose"):
        make(threshold=0.0).step(data(), state)


def test_a_table_is_of_the_workers_and_micro_batches_of_the_step(make):
    step = make(clock=SimulatedClock(table(workers=8)), threshold=1.0)
    with pytest.raises(ValueError, match=r"table of 8 workers and 5 micro-batches, .* has 4 and 5"):
        step.step(data(), step.init(params()))
    with pytest.raises(TypeError, match="are no Latencies"):
        SimulatedClock(np.ones((3, 4, 5)))


def test_nan_of_one_micro_batch_surfaces(make):
    batches = data()
    batches[0]["x"][0, 3] = np.nan
    step = make(threshold=0.0)
    metrics, state = step.step(batches, step.init(params()))
    assert np.isnan(state.params["w"][3]).all() and np.isnan(metrics.loss)


def test_narrow_gradients_are_summed_in_float32(make):
    """In bfloat16, 256 + 1 is 256."""

    def linear(params, batch):
        return (params["w"] * batch["x"].mean().astype(jnp.bfloat16)).sum()

    batches = [{"x": np.full(1, value, np.float32)} for value in (256, 1, 1, 1, 1)]
    mesh = jax.make_mesh((1,), ("data",))
    step = make(loss_fn=linear, threshold=np.inf, mesh=mesh, clock=wall_clock)
    found = step._accumulation.run(
        step.init({"w": jnp.zeros(4, jnp.bfloat16)}).params, batches, np.inf, 0
    )
    assert found.sums.gradient["w"].dtype == jnp.float32
    np.testing.assert_array_equal(found.sums.gradient["w"], np.full((1, 4), 260))
    _, state = step.step(batches, step.init({"w": jnp.zeros(4, jnp.bfloat16)}))
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(state.params["w"]), np.full(4, -52))


def test_parameters_of_the_user_stay_theirs(make):
    step = make(threshold=0.0)
    mine = jax.device_put(params(), jax.NamedSharding(step.mesh, jax.P()))
    state = step.init(mine)
    step.step(data(), state)
    np.testing.assert_array_equal(mine["w"], params()["w"])
    assert state.params["w"].is_deleted()  # donated


# ---------------------------------------------------------------------------------- the threshold


@pytest.mark.slow
def test_the_threshold_is_chosen_once_from_recorded_steps_and_a_rerun_has_the_same_bits(
    make, tmp_path
):
    latencies = table(seed=5, steps=6)
    calibration = Calibration(skip=1, steps=2, max_drop=0.3, candidates=50)
    fields = {
        "method": ErrorFeedback(inner=STOCHASTIC),
        "optimizer": optax.sgd(0.05, momentum=0.9),
        "clock": SimulatedClock(latencies),
        "threshold": calibration,
    }

    def steps(step, state, first, last):
        done = []
        for number in range(first, last):
            metrics, state = step.step(data(seed=number), state)
            done.append(int(metrics.done))
        return state, done

    step = make(**fields)
    state, done = steps(step, step.init(params()), 0, 3)
    assert done == [WORKERS * MICRO_BATCHES] * 3
    recorded = Latencies(*(array[1:3] for array in latencies))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), step.latencies, recorded)
    chosen = choose_threshold(*recorded, max_drop=0.3, candidates=50)
    assert chosen.speedup > 1 and 0 < chosen.drop_rate <= 0.3
    np.testing.assert_allclose(float(state.threshold), chosen.threshold, rtol=1e-5)
    np.testing.assert_allclose(step.effect.speedup, chosen.speedup, rtol=1e-4)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "3", state)
    last, done = steps(step, state, 3, 6)
    expected = replay(latencies.times[3:].cumsum(-1), chosen.threshold, 1, 0).done
    assert done == expected.sum(axis=1).tolist()
    assert min(done) < WORKERS * MICRO_BATCHES

    resumed = make(**fields)
    fresh = resumed.init(params())
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "3", fresh)
    again, done_again = steps(resumed, restored, 3, 6)
    assert done_again == done and resumed.effect is None
    jax.tree.map(np.testing.assert_array_equal, again, last)


def test_other_numbers_of_micro_batches_are_refused_while_recording(make):
    step = make(mesh=jax.make_mesh((1,), ("data",)), clock=wall_clock)
    _, state = step.step(data(devices=1), step.init(params()))
    with pytest.raises(ValueError, match="micro_batches has length 4, and 5 in the steps before"):
        step.step(data(devices=1)[:4], state)
    step.step(data(devices=1), state)  # it was not donated


def test_the_wall_clock_records_times_of_this_machine(make):
    step = dataclasses.replace(
        make(threshold=Calibration(skip=1, steps=2), mesh=jax.make_mesh((1,), ("data",))),
        clock=DropCompute.__dataclass_fields__["clock"].default,
    )
    state = step.init(params())
    for _ in range(3):
        _, state = step.step(data(devices=1), state)
    assert (step.latencies.times > 0).all() and (step.latencies.rest > 0).all()
    assert step.latencies.times.shape == (2, 1, MICRO_BATCHES)
    assert float(state.threshold) == np.inf == step.effect.threshold  # one worker waits for nobody
    assert step.effect.speedup == 1


def test_the_replay_of_a_run_is_what_it_did(make):
    """The gain that is predicted is of the steps that follow, if these have the same times."""
    latencies = table(seed=8)
    effect = effect_of_threshold(*latencies, 4.0)
    step = make(threshold=4.0, clock=SimulatedClock(latencies))
    state, rates = step.init(params()), []
    for _ in range(STEPS):
        metrics, state = step.step(data(), state)
        rates.append(float(metrics.drop_rate))
    assert 0.05 < effect.drop_rate < 0.95
    np.testing.assert_allclose(np.mean(rates), effect.drop_rate, atol=1e-6)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"min_done": 0}, "min_done=0"),
        ({"in_flight": -1}, "in_flight=-1"),
        ({"threshold": -1.0}, "threshold=-1.0"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"method": "dynamic"}, "dynamic"),
        ({"method": "dynamiq:wheel"}, "'wheel' is not an option"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"axis_name": "model"}, "axis_name=.*are not all axes of the mesh"),
        ({"axis_name": ("data", "model")}, "axis_name=.*are not all axes of the mesh"),
        ({"devices_per_worker": 3}, "devices_per_worker=3 does not divide the 4 devices"),
        ({"devices_per_worker": 0}, "devices_per_worker=0"),
    ),
)
def test_impossible_fields_are_refused(make, fields, message):
    with pytest.raises(ValueError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    "fields, message",
    (
        ({"skip": -1}, "skip=-1"),
        ({"steps": 0}, "steps=0"),
        ({"max_drop": 1.5}, "max_drop=1.5"),
        ({"candidates": 1}, "candidates=1"),
    ),
)
def test_impossible_calibrations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Calibration(**fields)


def test_impossible_arguments_are_refused(make):
    step = make(threshold=1.0)
    with pytest.raises(ValueError, match=r"params\['w'\] has dtype int32"):
        step.init({"w": np.zeros(3, np.int32)})
    with pytest.raises(ValueError, match="micro_batches is empty"):
        step.step([], step.init(params()))
    with pytest.raises(ValueError, match=r"micro_batches\[...\]\['mask'\] has shape \(6,\).*4 dev"):
        step.step(data(devices=3), step.init(params()))


# ------------------------------------------------------------------------------- several processes


def trained(folder) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(folder / f"end_{rank}.npz")) for rank in range(worker.NUM_PROCESSES)]


def simulated(done: np.ndarray) -> np.ndarray:
    """Parameters after training with as many micro-batches in each step and process."""
    w = np.zeros((worker.INPUTS, worker.OUTPUTS))
    for step, counts in enumerate(done):
        gradient = np.zeros_like(w)
        for rank, count in enumerate(counts):
            for index in range(count):
                batch = worker.micro_batch(step, rank, index)
                error = batch["x"] @ w - batch["y"]
                gradient += 2 * batch["x"].T @ error / error.size
        w -= worker.RATE * gradient / counts.sum()
    return w


def expected_done(chosen: float) -> np.ndarray:
    calibrating = worker.CALIBRATION.skip + worker.CALIBRATION.steps
    elapsed = worker.latencies().times.cumsum(-1)
    done = replay(elapsed, chosen, 1, 0).done
    done[:calibrating] = worker.MICRO_BATCHES
    return done


@pytest.mark.slow
def test_two_processes_do_other_numbers_and_end_with_the_same_bits(tmp_path):
    processes.run(worker.train, [(tmp_path, 2, "none")] * 2, devices=2)
    first, second = trained(tmp_path)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)
    recorded = Latencies(*(array[1:3] for array in worker.latencies()))
    np.testing.assert_allclose(first["times"], recorded.times, rtol=1e-6)
    np.testing.assert_allclose(first["rest"], recorded.rest, rtol=1e-5)
    chosen = choose_threshold(*recorded, max_drop=worker.CALIBRATION.max_drop)
    np.testing.assert_allclose(first["threshold"], chosen.threshold, rtol=1e-6)
    done = expected_done(chosen.threshold)
    assert (done[:, 0] != done[:, 1]).any()
    assert first["done"].tolist() == done.sum(axis=1).tolist()
    np.testing.assert_allclose(first["params"], simulated(done), rtol=1e-4, atol=1e-6)


def wait_for(path, seconds=processes.TIMEOUT):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


@slow
def test_a_micro_batch_that_hangs_holds_up_the_others_until_it_ends(tmp_path):
    """The threshold is checked between micro-batches: it does not cut one off."""
    step = worker.FAULTY_STEP
    recorded = Latencies(*(array[1:3] for array in worker.latencies()))
    done = expected_done(
        choose_threshold(*recorded, max_drop=worker.CALIBRATION.max_drop).threshold
    )
    arguments = [(tmp_path, 2, fault) for fault in ("none", "hang")]
    with processes.running(worker.train, arguments, devices=2) as running:
        wait_for(tmp_path / f"asked_{step}_0_{done[step, 0] - 1}")
        time.sleep(2)  # time enough to end the step, if nobody waited
        assert not (tmp_path / f"done_{step}_0").exists()
        assert [process.returncode for process in running] == [None, None]
        (tmp_path / "release").touch()
        errors = [process.errors() for process in running]
        assert [process.returncode for process in running] == [0, 0], errors
    first, second = trained(tmp_path)
    np.testing.assert_array_equal(first["params"], second["params"])
    # Late, the process that hung goes no further, and what it did counts.
    assert done[step, 1] > worker.FAULTY_MICRO_BATCH
    done[step, 1] = worker.FAULTY_MICRO_BATCH + 1
    assert first["done"].tolist() == done.sum(axis=1).tolist()
    np.testing.assert_allclose(first["params"], simulated(done), rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize(
    "fault, devices, heartbeat, told",
    (
        # Before the all-reduce, as in the middle of one: gloo raises.
        pytest.param("SIGKILL", 1, 100, "Gloo", id="killed"),
        # With several devices a process, gloo waits for one that has ended before: heartbeats help.
        pytest.param("SIGKILL", 2, 8, "heartbeat", id="killed_with_two_devices"),
        pytest.param("SIGSTOP", 1, 8, "heartbeat", id="stalled"),
    ),
)
def test_a_process_that_dies_in_a_micro_batch_ends_the_others(
    tmp_path, fault, devices, heartbeat, told
):
    arguments = [(tmp_path, devices, name) for name in ("none", fault)]
    with processes.running(
        worker.train, arguments, devices=devices, heartbeat=heartbeat
    ) as running:
        errors = running[0].errors()
        assert running[0].returncode != 0 and told in errors
    assert not (tmp_path / f"done_{worker.FAULTY_STEP}_0").exists()
    assert (tmp_path / f"done_{worker.FAULTY_STEP - 1}_0").exists()
