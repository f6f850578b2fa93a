"""EF21 with momentum: the sum of all estimates is the total, in every step, and it arrives at the
mean of the gradients. A bad step changes nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax.methods import ErrorFeedback, Exact, Method, resolve_method
from dynamiq_research import (
    EF21M,
    THC,
    ARCTopK,
    GlobalCompensation,
    OmniReduce,
    PowerSGD,
    TopKChunked,
)
from dynamiq_research.ef21m import EF21MState, sums_applied
from research.tests.support.resumed import Run
from tests.support.gradients import of_workers, vnmse
from tests.support.states import only
from tests.support.workers import call_on, simulated

NUM_WORKERS, SHAPE, SIZE = 4, (64, 80), 5120
KEY = jax.random.key(11)
ARC = ARCTopK(inner=Exact(), bits=4.0, block_size=64)
INNER = {"exact": Exact(), "thc": THC(block=256), "arc_top_k": ARC, "powersgd": PowerSGD(rank=4)}
every_inner = pytest.mark.parametrize("name", INNER)
CALL = call_on(SIZE, NUM_WORKERS, "all_to_all", shapes=(SHAPE,))


@functools.cache
def one_step(method: EF21M):
    """Return a function of (key, gradient, state) of each worker to the result of a step."""

    def local(key, gradient, state):
        reduced = method.all_reduce(gradient, CALL, key, state)
        assert reduced.applied is None
        return reduced.total, reduced.state

    return simulated(local)


@functools.cache
def alone(inner: Method):
    """Return a function of (key, values, state) to the sum and to what a worker applies."""

    def local(key, values, state):
        call = dataclasses.replace(CALL, feedback=True)
        reduced = inner.all_reduce(values, call, key, state)
        return reduced.total, reduced.applied

    return simulated(local)


def first_state(method: EF21M) -> EF21MState:
    """Return the first state of all workers, stacked."""
    state = method.init_state(CALL)
    return jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * NUM_WORKERS), state)


def some_state(method: EF21M, seed: int, step: int) -> EF21MState:
    """Return a state as after some steps: the estimates add up to the total."""
    tracker, estimate = (of_workers(seed + i, NUM_WORKERS, SIZE) for i in (10, 20))
    total = np.tile(estimate.sum(axis=0), (NUM_WORKERS, 1))
    steps = np.full(NUM_WORKERS, step, np.int32)
    return EF21MState(tracker, estimate, total, steps, first_state(method).inner)


# -------------------------------------------------------------------------------------- one step


@every_inner
@settings(max_examples=5, phases=(Phase.generate,))
@given(seed=st.integers(0, 99), step=st.integers(0, 30))
def test_a_step_is_that_of_the_papers(name, seed, step):
    """Workers send what their trackers differ from their estimates; all three sums move by it."""
    method = EF21M(inner=INNER[name])
    state, gradient = some_state(method, seed, step), of_workers(seed, NUM_WORKERS, SIZE)
    total, after = one_step(method)(KEY, gradient, state)
    weight = np.float32(max(0.1, 1 / (step + 1)))
    tracker = (1 - weight) * state.tracker + weight * gradient
    scale = np.abs(gradient).max()
    np.testing.assert_allclose(after.tracker, tracker, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_array_equal(after.step, step + 1)
    # From the very tracker of the step: near a tie, rounding would choose another block.
    moved, applied = alone(INNER[name])(KEY, after.tracker - state.estimate, state.inner)
    close = {"rtol": 1e-5, "atol": 1e-5 * scale}
    np.testing.assert_allclose(after.estimate, state.estimate + applied, **close)
    np.testing.assert_allclose(after.total, state.total + moved, **close)
    np.testing.assert_array_equal(total, after.total)
    np.testing.assert_array_equal(total, np.asarray(total)[:1].repeat(NUM_WORKERS, axis=0))


@every_inner
def test_the_first_step_is_the_method_inside(name):
    """The tracker is the gradient, bit for bit, whatever the momentum."""
    method, gradient = EF21M(inner=INNER[name]), of_workers(0, NUM_WORKERS, SIZE)
    state = first_state(method)
    total, after = one_step(method)(KEY, gradient, state)
    np.testing.assert_array_equal(after.tracker, gradient)
    inside, applied = alone(INNER[name])(KEY, gradient, state.inner)
    np.testing.assert_allclose(total, inside, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(after.estimate, applied, rtol=1e-5, atol=1e-8)


BAD = INNER | {
    "arc_top_k without room": dataclasses.replace(ARC, bits=1.0),
    "topk_chunked": TopKChunked(inner=Exact(), bits=4.0, block_size=64),
    "omnireduce": OmniReduce(inner=Exact(), density=None, capacity=0.1, block_size=64),
}


@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("name", BAD)
def test_what_is_not_finite_surfaces_and_leaves_the_state_as_it_was(name, bad):
    """In the gradient of one worker, on all workers. Another step then is the one that it had been
    without.
    """
    method = EF21M(inner=BAD[name])
    state, gradient = some_state(method, 3, 5), of_workers(3, NUM_WORKERS, SIZE)
    spoilt = gradient.copy()
    spoilt[2, 70], spoilt[1, :: SIZE // 20] = bad, -bad
    total, after = one_step(method)(KEY, spoilt, state)
    assert not np.isfinite(total)[:, [70, 0, SIZE // 20]].any()
    assert {replica.tobytes() for replica in np.asarray(total)} == {np.asarray(total[0]).tobytes()}
    jax.tree.map(np.testing.assert_array_equal, after, state)
    for ours, expected in zip(
        jax.tree.leaves(one_step(method)(KEY, gradient, after)),
        jax.tree.leaves(one_step(method)(KEY, gradient, state)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, expected)
        assert np.isfinite(ours).all()


# ------------------------------------------------------------------------------------- over steps


@functools.cache
def steps_of(method: Method, steps: int, agreement: float = 0.5):
    """Return a function of a seed to the last state, to the result of every step, and to the means
    of all gradients, of four workers that differ.
    """

    def local(key, worker):
        # Gradients that shrink, as in training.
        common = jax.random.normal(key, (SIZE,))

        def step(state, t):
            each = jax.random.fold_in(jax.random.fold_in(key, t), worker)
            noise = jax.random.normal(each, (SIZE,))
            size = jnp.exp(-t.astype(jnp.float32) / steps)
            gradient = size * agreement * common + (1 - agreement) * noise
            drawn = jax.random.fold_in(jax.random.key(0), t)
            reduced = method.all_reduce(gradient, CALL, drawn, state)
            return reduced.state, (reduced.total, jax.lax.psum(gradient, "data"))

        last, (totals, sums) = jax.lax.scan(step, method.init_state(CALL), jnp.arange(steps))
        return last, totals, sums

    run = simulated(local)
    return lambda seed: jax.tree.map(np.asarray, run(jax.random.key(seed), np.arange(NUM_WORKERS)))


def drift(state: EF21MState) -> float:
    """Return the distance of the total from the sum of the estimates, relative to that sum."""
    estimates = state.estimate.sum(axis=0, dtype=np.float64)
    return float(np.sqrt(vnmse(state.total[0], estimates)))


@every_inner
@pytest.mark.slow
def test_the_sum_of_the_estimates_stays_the_total(name, steps=200):
    """Law: only float32 rounding comes between them."""
    state, _, _ = steps_of(EF21M(inner=INNER[name]), steps)(0)
    assert drift(state) < 1e-5
    np.testing.assert_array_equal(state.total, state.total[:1].repeat(NUM_WORKERS, axis=0))
    np.testing.assert_array_equal(state.step, steps)
    assert np.all(np.any(state.estimate[1:] != state.estimate[:-1], axis=1))
    # And the total follows the trackers.
    error = vnmse(state.total[0], state.tracker.sum(axis=0, dtype=np.float64))
    windows = {
        "exact": (0, 1e-10),
        "thc": (1e-4, 1e-3),
        "arc_top_k": (0.03, 0.12),
        "powersgd": (0.03, 0.15),
    }
    low, high = windows[name]
    assert low <= error < high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claims(dq.methods.BF16):
    """BF16 that is not refused."""


sums_applied.register(Claims, lambda method: True)


@pytest.mark.slow
def test_hops_that_round_make_the_total_drift(steps=200):
    """The reason why such methods are refused."""
    inner = dataclasses.replace(ARC, inner=Claims())
    assert 1e-3 < drift(steps_of(EF21M(inner=inner), steps)(0)[0]) < 0.1


@pytest.mark.parametrize("momentum", (0.1, 1.0))
def test_the_result_is_a_mean_of_gradients(momentum):
    """First the plain mean of all so far, then one with weights that fall by 1 - momentum: with a
    momentum of 1, the exact sum of each step.
    """
    steps = 25
    _, totals, sums = steps_of(EF21M(inner=Exact(), momentum=momentum), steps)(2)
    expected = np.zeros(SIZE)
    for step in range(steps):
        weight = max(momentum, 1 / (step + 1))
        expected = (1 - weight) * expected + weight * sums[0, step].astype(np.float64)
        np.testing.assert_allclose(totals[0, step], expected, rtol=1e-3, atol=1e-5)
    plain = sums[0, : int(1 / momentum)].mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(totals[0, int(1 / momentum) - 1], plain, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_stays_arrives_in_every_single_step():
    """With error feedback it only does so in the mean over steps."""
    gradient = of_workers(0, NUM_WORKERS, SIZE).reshape(NUM_WORKERS, *SHAPE)
    truth, errors = gradient.mean(axis=0, dtype=np.float64), {}
    for method in (EF21M(inner=ARC), ErrorFeedback(inner=ARC)):
        reduce = dq.all_reduce_gradients("data", method=method)

        def local(_, gradient, reduce=reduce):
            def step(state, _):
                mean, state = reduce.update(gradient, state)
                return state, mean

            return jax.lax.scan(step, reduce.init(gradient), length=40)[1]

        means = np.asarray(simulated(local)(KEY, gradient))[0]
        errors[type(method)] = [vnmse(mean, truth) for mean in means]
    assert errors[EF21M][0] > 0.1 and errors[EF21M][-1] < 1e-10
    assert errors[ErrorFeedback][-1] > 0.1


# ---------------------------------------------------------------------------------- on a mesh


def gradient_of(step: int) -> np.ndarray:
    return of_workers(step, NUM_WORKERS, SIZE).reshape(NUM_WORKERS, *SHAPE)


def test_a_checkpoint_resumes_the_run_bit_for_bit(data_mesh, tmp_path):
    gradients = np.stack([gradient_of(step) for step in range(4)], axis=1)
    run = Run([EF21M(inner=ARC)] * 4, data_mesh(NUM_WORKERS), gradients)
    assert only(run.start).tracker.shape == (NUM_WORKERS, SIZE)
    _, half = run.check_resumes(tmp_path)
    assert drift(jax.tree.map(np.asarray, only(half))) < 1e-5


def test_it_costs_no_bytes():
    tree = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    for inner in INNER.values():
        reports = [
            dq.wire_report(tree, NUM_WORKERS, method=method)
            for method in (inner, EF21M(inner=inner))
        ]
        assert reports[0].compressed_bytes == reports[1].compressed_bytes


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "inner",
    (
        dq.methods.BF16(),
        dq.DynamiQ(),
        THC(sum_bits=6),
        ARCTopK(),
        TopKChunked(),
        PowerSGD(inner=dq.methods.BF16()),
    ),
    ids=lambda inner: f"{type(inner).__name__}",
)
def test_methods_whose_hops_round_are_refused(inner):
    with pytest.raises(
        ValueError, match=r"(?s)inner=.* rounds partial sums.*drift.*Give dq\.methods\.Exac"
    ):
        EF21M(inner=inner)


@pytest.mark.parametrize("wrapper", (ErrorFeedback, GlobalCompensation, EF21M))
def test_wrappers_with_a_memory_are_refused(wrapper):
    with pytest.raises(ValueError, match=r"inner=.*already keeps what.*Give Exact\(\)"):
        EF21M(inner=wrapper(inner=Exact()))


def test_something_that_is_not_a_method():
    with pytest.raises(ValueError, match=r"inner='exact' is not a method\. Give one"):
        EF21M(inner="exact")


@pytest.mark.parametrize("momentum", (0, -0.1, 1.1, float("nan"), "0.1", True))
def test_an_impossible_momentum(momentum):
    with pytest.raises(ValueError, match=rf"momentum={momentum!r} is out of range\. Give more"):
        EF21M(inner=Exact(), momentum=momentum)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(dq.methods.Exact):
    """Does not say what it applies."""

    def all_reduce(self, flat, call, key, state):
        return dataclasses.replace(super().all_reduce(flat, call, key, state), applied=None)


def test_a_method_that_does_not_say_what_it_applied():
    with pytest.raises(ValueError, match=r"inner=.*Silent\(\) does not return the values that it"):
        steps_of(EF21M(inner=Silent()), 2)(0)


def test_a_name_makes_it():
    assert resolve_method("ef21m+thc:6") == EF21M(inner=THC(code_bits=6))
    with pytest.raises(ValueError, match="rounds partial sums"):
        resolve_method("ef21m+bf16")
