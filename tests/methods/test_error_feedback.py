"""Error feedback: what is applied and what is kept make up what came in, on every worker, in every
step, and over all of them.
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
from dynamiq_jax.methods import BlockInt, ErrorFeedback, Method
from dynamiq_jax.topologies import AllToAll, Ring
from tests.support.gradients import of_workers, vnmse
from tests.support.hlo import PRESETS, sent_bytes
from tests.support.states import of_buckets, only
from tests.support.workers import TWO_WIDTHS, Decaying, Largest, call_on, on_mesh, simulated

NUM_WORKERS, STEPS = 4, 6
SHAPE, SIZE = (125, 160), 20_000
KEY = jax.random.key(8)
NEAREST = dataclasses.replace(TWO_WIDTHS, rounding="nearest")
# Name to the method, to the share of the energy that it leaves out, and to what hops lose besides.
INNER = {
    "largest": (Largest(), (0.05, 1.0), 1e-10),
    "blocks": (BlockInt(code_bits=4), (1e-3, 0.05), 0.02),
    "nearest": (NEAREST, (1e-6, 0.01), 0.02),
    "bf16": (dq.methods.BF16(), (1e-7, 1e-4), 1e-4),
    "exact": (dq.methods.Exact(), (0, 0), 1e-10),
}
every_inner = pytest.mark.parametrize("name", INNER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telling(Method):
    """A method around another one that tells what it applied."""

    inner: Method

    def wire_cost(self, call):
        return self.inner.wire_cost(call)

    def init_state(self, call):
        return self.inner.init_state(call)

    def all_reduce(self, flat, call, key, state):
        reduced = self.inner.all_reduce(flat, call, key, state)
        return dataclasses.replace(reduced, metrics={"applied": reduced.applied})


@functools.cache
def one_step(name: str):
    """Return a function of (gradient, residual) of each worker to (total, applied, kept)."""
    feedback = ErrorFeedback(inner=Telling(inner=INNER[name][0]))
    call = call_on(SIZE, NUM_WORKERS, "all_to_all", shapes=(SHAPE,))

    def local(key, gradient, residual):
        state = feedback.init_state(call)._replace(residual=residual)
        after = feedback.all_reduce(gradient, call, key, state)
        return after.total, after.metrics["applied"], after.state.residual

    return simulated(local)


# --------------------------------------------------------------------------- one step, each worker


@pytest.mark.sampled(4)
@every_inner
@settings(max_examples=5, phases=(Phase.generate,))
@given(seed=st.integers(0, 99), exponent=st.integers(-30, 30), share=st.sampled_from((0, 0.1, 3)))
def test_what_is_applied_and_what_is_kept_make_up_what_came_in(name, seed, exponent, share):
    """Law, for each worker: applied + residual == gradient + previous residual."""
    scale = np.float32(10.0**exponent)
    gradient = of_workers(seed, NUM_WORKERS, SIZE) * scale
    residual = of_workers(seed + 1, NUM_WORKERS, SIZE) * np.float32(share) * scale
    total, applied, kept = map(np.asarray, one_step(name)(KEY, gradient, residual))
    wanted = gradient + residual
    largest = np.maximum(np.abs(applied), np.abs(wanted))
    off = np.abs(applied + kept - wanted)
    assert (off <= 2.0**-22 * largest + np.finfo(np.float32).tiny).all()  # subnormals are flushed
    _, (low, high), most = INNER[name]
    assert low <= vnmse(applied / scale, wanted / scale) <= high
    # What all workers applied is what was summed, up to what hops lose.
    assert vnmse(total[0] / scale, applied.sum(axis=0, dtype=np.float64) / scale) < most


def test_values_that_are_applied_are_carried_without_another_loss():
    """One sender to one owner: bfloat16 values stay what they are, and only their sum is rounded.

    What error feedback keeps would be sent twice if the whole gradient went out instead.
    """
    gradient = of_workers(0, NUM_WORKERS, SIZE)
    total, applied, _ = one_step("bf16")(KEY, gradient, np.zeros_like(gradient))
    rounded = gradient.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(applied, rounded)
    expected = rounded.sum(axis=0).astype(jnp.bfloat16).astype(np.float32)
    assert np.mean(np.asarray(total[0]) == expected) > 0.99  # ties, by the order of additions


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("name", ("largest", "nearest", "bf16"))
def test_what_is_not_finite_surfaces_and_is_not_kept(name, value):
    gradient = of_workers(0, NUM_WORKERS, SIZE)
    gradient[1, 7] = value
    total, _, kept = map(np.asarray, one_step(name)(KEY, gradient, np.zeros_like(gradient)))
    assert not np.isfinite(total[:, 7]).any()
    assert np.isfinite(kept).all()
    assert kept[1, 7] == 0
    assert np.mean(kept[1] != 0) > 0.5
    assert np.isfinite(total[:, 1000:]).all()
    good = of_workers(1, NUM_WORKERS, SIZE)
    assert np.isfinite(one_step(name)(KEY, good, kept)[0]).all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saturating(dq.methods.Exact):
    """Sums of values that are clipped, so that Inf enters them as a finite number."""

    def all_reduce(self, flat, call, key, state):
        clipped = jnp.clip(flat, -1, 1)
        reduced = super().all_reduce(clipped, call, key, state)
        return dataclasses.replace(reduced, applied=clipped)


@pytest.mark.parametrize("value", (np.inf, -np.inf))
def test_what_a_method_saturates_is_not_kept_as_infinity(value):
    feedback, call = ErrorFeedback(inner=Saturating()), call_on(8, 2)
    gradient = np.array([[0.5, value, 3, 1e38], [0.5, 2, 0, 0]], np.float32).repeat(2, axis=1)

    def local(key, gradient):
        state = feedback.all_reduce(gradient, call, key, feedback.init_state(call)).state
        return state.residual

    kept = simulated(local)(KEY, gradient)
    np.testing.assert_array_equal(kept[0, ::2], np.float32([0, 0, 2, 1e38]))


# ----------------------------------------------------------------------------------- over steps


def steps_of(method: Method | str):
    """Return a local function of gradients [steps, *shape] to the outputs and residuals of
    `all_reduce_gradients`, and to the last state.
    """
    reduce = dq.all_reduce_gradients("data", method=method)

    def local(_, gradients):
        def step(state, gradient):
            output, state = reduce.update(gradient, state)
            return state, (output, only(state).residual[0])

        state, (outputs, residuals) = jax.lax.scan(step, reduce.init(gradients[0]), gradients)
        return outputs.reshape(-1, SIZE), residuals, state

    return local


@functools.cache
def gradients() -> np.ndarray:
    """Return [n, steps, *shape]."""
    each = [of_workers(step, NUM_WORKERS, SIZE) for step in range(STEPS)]
    return np.stack(each, axis=1).reshape(NUM_WORKERS, STEPS, *SHAPE)


@functools.cache
def simulated_run(method: Method):
    outputs, residuals, state = simulated(steps_of(method))(KEY, gradients())
    return np.asarray(outputs), np.asarray(residuals), state


FEEDBACK, OF_BLOCKS = ErrorFeedback(inner=Largest()), ErrorFeedback(inner=BlockInt())


def test_nothing_is_lost_over_time():
    """In any step, what was applied so far and what is kept are what came in so far."""
    outputs, residuals, _ = simulated_run(FEEDBACK)
    came_in = gradients().reshape(NUM_WORKERS, STEPS, SIZE).cumsum(axis=1, dtype=np.float64)
    applied = NUM_WORKERS * outputs[0].cumsum(axis=0, dtype=np.float64)
    for step in range(STEPS):
        truth = came_in[:, step].sum(axis=0)
        assert vnmse(applied[step] + residuals[:, step].sum(axis=0), truth) < 1e-9
        assert 0.05 < vnmse(applied[step], truth) < 1.0
        assert np.any(residuals[:, step])


def test_a_gradient_that_stays_arrives():
    """The mean over steps of what is applied is off by the residual over the number of steps, and
    the residual stops growing. Without feedback, small values never arrive.
    """
    num_steps, gradient = 60, gradients()[:, :1]
    repeated = gradient.repeat(num_steps, axis=1)
    truth = gradient[:, 0].mean(axis=0, dtype=np.float64).reshape(-1)
    method = ErrorFeedback(inner=Largest(share=1 / 4))
    outputs, residuals, _ = simulated(steps_of(method))(KEY, repeated)
    errors = [vnmse(np.asarray(outputs[0, :t], float).mean(axis=0), truth) for t in (1, 20, 60)]
    norms = np.linalg.norm(np.asarray(residuals, float).mean(axis=0), axis=1)
    assert norms[-1] == pytest.approx(norms[19], rel=0.08)
    assert errors[2] == pytest.approx(errors[1] / 3**2, rel=0.15)
    assert errors[0] > 0.01 and errors[1] < errors[0] / 10
    reduce = dq.all_reduce_gradients("data", method=method.inner)
    alone = simulated(lambda _, g: reduce.update(g, reduce.init(g))[0])(KEY, gradient[:, 0])
    assert vnmse(np.asarray(alone[0]).reshape(-1), truth) == pytest.approx(errors[0], rel=1e-3)


@pytest.mark.parametrize("method", (FEEDBACK, OF_BLOCKS), ids=("largest", "bits"))
def test_replicas_stay_identical_while_their_residuals_differ(method):
    outputs, residuals, _ = simulated_run(method)
    np.testing.assert_array_equal(outputs, outputs[:1].repeat(NUM_WORKERS, axis=0))
    assert np.all(np.any(residuals[1:] != residuals[:-1], axis=-1))


def test_state_is_carried_the_same_way_on_a_mesh(data_mesh):
    """Bit for bit, with a method inside whose scales are maxima: sums of squares may differ in the
    last bit between two programs.
    """
    run = on_mesh(steps_of(OF_BLOCKS), data_mesh(NUM_WORKERS))
    for ours, expected in zip(run(KEY, gradients()), simulated_run(OF_BLOCKS), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, expected)


# ------------------------------------------------------------------------------------- the state


def test_state_has_the_size_of_its_bucket():
    reduce = dq.all_reduce_gradients("data", method=ErrorFeedback(inner=Decaying()))
    tree = {"a": jnp.ones(5000), "b": jnp.ones((60, 50), jnp.bfloat16), "c": jnp.ones(10)}

    def init(_):
        return reduce.init(tree)

    state = jax.eval_shape(jax.vmap(init, axis_name="data"), jnp.zeros(NUM_WORKERS))
    states = [tuple(bucket) for bucket in of_buckets(state).values()]
    shapes = jax.tree.map(lambda leaf: leaf.shape[2:], states)
    assert shapes == [((5000,), (5000,)), ((3000,), (3000,))]
    assert {leaf.dtype for leaf in jax.tree.leaves(of_buckets(state))} == {jnp.dtype(jnp.float32)}


def test_it_costs_no_bytes():
    tree = {"w": jax.ShapeDtypeStruct((300, 200), jnp.float32)}
    for inner in PRESETS.values():
        for topology in (Ring(), AllToAll()):
            reports = [
                dq.wire_report(tree, NUM_WORKERS, method=dq.Compression(method, topology))
                for method in (inner, ErrorFeedback(inner=inner))
            ]
            assert reports[0].compressed_bytes == reports[1].compressed_bytes
            assert reports[1].bytes_per_worker == reports[1].compressed_bytes + 6  # the check


def test_statistics_travel_once(data_mesh):
    """The compiled program, where the values that are sent are not those that came in."""
    tree = {"w": jax.ShapeDtypeStruct((100, 200), jnp.float32)}
    method = ErrorFeedback(inner=TWO_WIDTHS)
    report = dq.wire_report(tree, NUM_WORKERS, method=method)
    assert sent_bytes(data_mesh(NUM_WORKERS), tree, method, "ring") == report.bytes_per_worker


# ----------------------------------------------------------------------------------------- errors


def test_an_inner_method_that_cannot_be():
    with pytest.raises(ValueError, match=r"inner=ErrorFeedback.*second time.*Give Largest"):
        ErrorFeedback(inner=FEEDBACK)
    with pytest.raises(ValueError, match=r"inner='bf16' is not a method\. Give one"):
        ErrorFeedback(inner="bf16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(dq.methods.Exact):
    """Does not say what it applies."""

    def all_reduce(self, flat, call, key, state):
        return dataclasses.replace(super().all_reduce(flat, call, key, state), applied=None)


def test_a_method_that_does_not_say_what_it_leaves_out():
    reduce = dq.all_reduce_gradients("data", method=ErrorFeedback(inner=Silent()))
    words = r"inner=.*Silent\(\) does not return the values that it applied"
    with pytest.raises(ValueError, match=words):
        simulated(lambda _, g: reduce.update(g, reduce.init(g)))(KEY, gradients()[:, 0])
