"""Global compensation: with the means, it adds up to the gradients, and it has to be reset."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq
from dynamiq_jax.methods import BF16, BlockInt, ErrorFeedback, Exact, resolve_method
from dynamiq_research import GlobalCompensation, Marsit, OmniReduce, PowerSGD
from research.tests.support.resumed import Run
from tests.support.gradients import of_workers, vnmse
from tests.support.states import only
from tests.support.workers import call_on, simulated

NUM_WORKERS, SHAPE, SIZE = 4, (40, 125), 5000
KEY = jax.random.key(5)
SIGNS = GlobalCompensation(inner=Marsit())
FULL = dataclasses.replace(SIGNS, exact=True)


@functools.cache
def step_of(method, topology: str = "ring"):
    """Return a function of (key, gradient, state) of each worker to (total, state)."""
    call = call_on(SIZE, NUM_WORKERS, topology, shapes=(SHAPE,))

    def local(key, gradient, state):
        reduced = method.all_reduce(gradient, call, key, state)
        assert reduced.applied is None
        return reduced.total, reduced.state

    return simulated(local)


def start_of(method):
    """Return first states, [workers, ...]."""
    state = method.init_state(call_on(SIZE, NUM_WORKERS, shapes=(SHAPE,)))
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_WORKERS), state)


# ------------------------------------------------------------------------------------------- law


@pytest.mark.parametrize(
    ("inner", "topology"),
    ((Marsit(), "ring"), (Marsit(), "butterfly"), (PowerSGD(rank=2), "ring"), (BF16(), "ring")),
    ids=("marsit", "butterfly", "powersgd", "bf16"),
)
def test_nothing_is_lost_over_time(inner, topology, steps=50):
    """What was applied and the mean compensation are what came in, with whatever hops lose."""
    method = GlobalCompensation(inner=inner)
    state, came_in, applied = start_of(method), np.zeros(SIZE), np.zeros(SIZE)
    for number in range(steps):
        gradient = of_workers(number, NUM_WORKERS, SIZE)
        total, state = step_of(method, topology)(jax.random.key(number), gradient, state)
        came_in += gradient.mean(axis=0, dtype=np.float64)
        applied += np.asarray(total[0], np.float64) / NUM_WORKERS
    kept = np.asarray(state.compensation, np.float64)
    error = applied + kept.mean(axis=0) - came_in
    assert np.abs(error).max() < 1e-5 * np.abs(came_in).max()
    assert vnmse(applied, came_in) > 1e-9  # something was kept
    assert np.all(np.any(kept[1:] != kept[:-1], axis=1))  # by each worker


def test_a_step_is_that_of_the_method_inside_on_gradient_and_compensation():
    gradient, before = of_workers(0, NUM_WORKERS, SIZE), of_workers(1, NUM_WORKERS, SIZE)
    state = start_of(SIGNS)._replace(compensation=before)
    total, after = map(jax.tree.leaves, step_of(SIGNS)(KEY, gradient, state))
    call = call_on(SIZE, NUM_WORKERS)
    alone = simulated(lambda key, g: Marsit().all_reduce(g, call, key, ()).total)
    expected = np.asarray(alone(KEY, gradient + before))
    np.testing.assert_array_equal(total[0], expected)
    kept = gradient + before - expected / NUM_WORKERS
    np.testing.assert_allclose(after[0], kept, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_compensations_collect_noise_where_residuals_do_not(num_workers=8, size=1024, steps=100):
    """The reason for exact steps: growth with the square root of the steps, from noise of each
    worker's own. A local residual stays where it is.
    """
    call = call_on(size, num_workers, "all_to_all")
    compensation, residual = SIGNS, ErrorFeedback(inner=Marsit())

    def local(key, worker_key):
        def step(states, number):
            noise = jax.random.normal(jax.random.fold_in(worker_key, number), (size,))
            each = [
                method.all_reduce(0.3 + noise, call, jax.random.fold_in(key, number), state).state
                for method, state in zip((compensation, residual), states, strict=True)
            ]
            return tuple(each), [jnp.mean(jnp.square(state[0])) for state in each]

        start = compensation.init_state(call), residual.init_state(call)
        return jax.lax.scan(step, start, jnp.arange(steps))[1]

    squares = simulated(local)(KEY, jax.random.split(jax.random.key(1), num_workers))
    collected, kept = (np.sqrt(np.mean(square, axis=0)) for square in squares)
    windows = ((1, 1.1, 1.35), (10, 3.5, 4.8), (100, 11.0, 15.5))
    assert [(t, low < collected[t - 1] < high) for t, low, high in windows] == [
        (t, True) for t, _, _ in windows
    ], collected[[0, 9, 99]]
    assert kept[9:].min() > 0.7 and kept.max() < 1.1


# ------------------------------------------------------------------------------------ exact steps


def test_an_exact_step_sums_all_and_resets():
    gradient, before = of_workers(0, NUM_WORKERS, SIZE), of_workers(1, NUM_WORKERS, SIZE)
    state = start_of(SIGNS)._replace(compensation=before)
    total, after = step_of(FULL)(KEY, gradient, state)
    truth = (gradient + before).sum(axis=0, dtype=np.float64)
    assert vnmse(total[0], truth) < 1e-12
    assert not np.any(after.compensation)
    _, compressed = step_of(SIGNS)(KEY, gradient, state)
    assert jax.tree.structure(after) == jax.tree.structure(compressed)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, compressed)


def test_an_exact_step_leaves_the_state_inside_as_it_is():
    method = GlobalCompensation(inner=PowerSGD(rank=2))
    gradient = of_workers(0, NUM_WORKERS, SIZE)
    _, state = step_of(method)(KEY, gradient, start_of(method))
    _, after = step_of(dataclasses.replace(method, exact=True))(KEY, gradient, state)
    jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
    assert not np.array_equal(state.inner[0], start_of(method).inner[0])


def test_metrics_are_those_of_the_method_inside_and_zero_in_an_exact_step():
    method = GlobalCompensation(inner=OmniReduce(density=None, capacity=0.5))
    gradient = of_workers(0, 2, 4096)
    found = []
    for exact in (False, True):
        arguments = dataclasses.replace(method, exact=exact)
        reduce = dq.all_reduce_gradients("data", method=arguments)
        run = simulated(lambda _, g, r=reduce: r.update(g, r.init(g))[1])
        found.append(run(KEY, gradient).metrics["left_out"][0])
    assert found[0] > 0.3 and found[1] == 0


def test_exact_steps_send_float32():
    tree = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    report = functools.partial(dq.wire_report, tree, NUM_WORKERS)
    for method, inner in ((SIGNS, Marsit()), (FULL, Exact())):
        assert report(method=method).compressed_bytes == report(method=inner).compressed_bytes


# ------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("exact", (False, True))
def test_what_is_not_finite_surfaces_and_is_not_kept(value, exact):
    method = dataclasses.replace(SIGNS, exact=exact)
    gradient = of_workers(0, NUM_WORKERS, SIZE)
    gradient[1, 7] = value
    total, state = step_of(method)(KEY, gradient, start_of(method))
    assert not np.isfinite(np.asarray(total)[:, 7]).any()
    kept = np.asarray(state.compensation)
    assert np.isfinite(kept).all() and not kept[:, 7].any()
    assert exact or np.mean(kept[:, 256:] != 0) > 0.9
    good, _ = step_of(method)(KEY, of_workers(1, NUM_WORKERS, SIZE), state)
    assert np.isfinite(np.asarray(good)).all()


@pytest.mark.parametrize("inner", (Marsit(), BlockInt()), ids=("marsit", "blockint"))
def test_a_checkpoint_resumes_the_run_bit_for_bit(data_mesh, tmp_path, inner):
    """With an exact step in between, of a second program with the same state."""
    method = GlobalCompensation(inner=inner)
    exact = dataclasses.replace(method, exact=True)
    gradients = of_workers(0, NUM_WORKERS, 5 * SIZE).reshape(NUM_WORKERS, 5, SIZE)
    run = Run([method, method, method, exact, method], data_mesh(NUM_WORKERS), gradients)
    assert only(run.start).compensation.shape == (NUM_WORKERS, SIZE)
    outputs, _ = run.check_resumes(tmp_path)
    # The mean of compensations is part of the exact mean.
    kept = np.asarray(only(run.steps(run.start, 0, 3)[1]).compensation)
    np.testing.assert_allclose(outputs[3], (gradients[:, 3] + kept).mean(axis=0), atol=1e-6)


# ----------------------------------------------------------------------------------------- errors


def test_its_name_is_that_of_the_method_inside_behind_gc():
    assert resolve_method("gc+marsit") == SIGNS
    assert resolve_method("gc+blockint:4") == GlobalCompensation(inner=BlockInt(code_bits=4))


@pytest.mark.parametrize("inner", (SIGNS, ErrorFeedback(inner=Marsit())))
def test_something_is_kept_once(inner):
    with pytest.raises(ValueError, match=r"inner=.* already keeps .* Give Marsit\(scale=None\)\."):
        GlobalCompensation(inner=inner)


def test_error_feedback_around_it_is_refused():
    with pytest.raises(ValueError, match=r"inner=Global.* already keeps .* Give Marsit"):
        ErrorFeedback(inner=SIGNS)


def test_bad_fields_are_named():
    with pytest.raises(ValueError, match=r"inner='marsit' is not a method\. Give one"):
        GlobalCompensation(inner="marsit")
    with pytest.raises(ValueError, match=r"exact=1 is not possible\. Give True or False"):
        GlobalCompensation(inner=Marsit(), exact=1)
