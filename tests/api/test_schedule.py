"""Schedules: methods by step, in one program or in one for each phase."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._plan.recording import recording
from dynamiq_jax.methods import METHODS, ErrorFeedback, resolve_method
from tests.support.gradients import of_workers, vnmse
from tests.support.states import of_buckets, on_mesh
from tests.support.workers import Decaying, Largest

WORKERS, STEPS = 4, 6
GRADIENTS = of_workers(0, WORKERS, STEPS * 4096).reshape(WORKERS, STEPS, 64, 64)


class Run:
    """Steps on a mesh: of one program, or of one for each phase."""

    def __init__(self, mesh, schedule, *, static=False):
        self.schedule, self.static = schedule, static

        @functools.cache
        def functions(phase):
            reduce = dq.all_reduce_gradients("data", method=schedule, seed=1, phase=phase)
            return on_mesh(reduce, mesh)

        self._functions = functions
        self.start = functions(None)[0](GRADIENTS[0, 0])

    def steps(self, state, first, last):
        outputs = []
        for number in range(first, last):
            phase = self.schedule.phase(number) if self.static else None
            output, state = self._functions(phase)[1](GRADIENTS[:, number], state)
            outputs.append(np.asarray(output))
        return outputs, state


def errors(outputs):
    return [vnmse(out, GRADIENTS[:, n].mean(0, dtype=np.float64)) for n, out in enumerate(outputs)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", METHODS.own)
def test_warm_up_is_exact_and_then_every_method_takes_over(data_mesh, name):
    run = Run(data_mesh(WORKERS), dq.Schedule({0: "exact", 2: name}))
    outputs, state = run.steps(run.start, 0, 4)
    if not state.method:  # as alone, in the same step
        alone = Run(data_mesh(WORKERS), dq.Schedule({0: name}))
        expected, _ = alone.steps(run.start._replace(step=jnp.int32(2)), 2, 3)
        np.testing.assert_array_equal(outputs[2], expected[0])
    assert max(errors(outputs)[:2]) < 1e-12
    if name != "exact":
        assert min(errors(outputs)[2:]) > 1e-7
    assert int(state.step) == 4


@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_run_resumes_bit_identically_before_and_after_the_switch(
    data_mesh, tmp_path, killed_after
):
    run = Run(data_mesh(WORKERS), dq.Schedule({0: "ef+exact", 2: "ef+mxfp4", 4: "bf16"}))
    whole, last = run.steps(run.start, 0, STEPS)
    before, state = run.steps(run.start, 0, killed_after)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", state)
    after, resumed = run.steps(restored, killed_after, STEPS)
    np.testing.assert_array_equal(before + after, whole)
    jax.tree.map(np.testing.assert_array_equal, resumed, last)


def test_one_program_for_each_phase_gives_the_same_bits(data_mesh):
    schedule = dq.Schedule({0: "ef+bf16", 2: "ef+mxfp4", 4: {"": "blockint:6"}})
    (one, of_one), (several, of_several) = (
        run.steps(run.start, 0, STEPS)
        for run in (Run(data_mesh(WORKERS), schedule, static=s) for s in (False, True))
    )
    np.testing.assert_array_equal(one, several)
    jax.tree.map(np.testing.assert_array_equal, of_one, of_several)


def test_phases_of_like_states_share_them(data_mesh):
    """What a phase leaves out is added in the next one. Other shapes have states of their own."""
    largest, other = ErrorFeedback(inner=Largest()), ErrorFeedback(inner=Decaying())
    schedule = dq.Schedule({0: largest, 2: "ef+exact", 3: other, 4: "exact"})
    run = Run(data_mesh(WORKERS), schedule)
    kinds = [name.split("-")[0] for name in of_buckets(run.start)]
    assert kinds == ["ErrorFeedback", "ErrorFeedback_Decaying"]
    outputs, state = run.steps(run.start, 0, 3)
    total, truth = sum(outputs), GRADIENTS[:, :3].mean(0, dtype=np.float64).sum(0)
    assert vnmse(total, truth) < 1e-4 < 1e-2 < vnmse(outputs[0], GRADIENTS[:, 0].mean(0))
    assert np.abs(state.method[min(state.method)].residual).max() < 1e-5


def test_phases_of_other_leaves_start_from_states_of_their_own(data_mesh):
    """A residual is never added to the gradients of other leaves, whatever its shape."""
    first, second = ({leaves: "ef+bf16", "": "ef+blockint:4"} for leaves in ("a|c", "a|b"))
    scales = {"a": 1, "b": 100, "c": 0.01, "d": 1}

    def run(schedule, start, steps):
        reduce = dq.all_reduce_gradients("data", method=schedule, start_step=start)

        def local(stacked):
            tree = {name: scale * stacked for name, scale in scales.items()}
            state = reduce.init(tree)
            for _ in range(steps):
                mean, state = reduce.update(tree, state)
            return mean

        return jax.jit(jax.vmap(local, axis_name="data"))(GRADIENTS[:, 0])

    switched = run(dq.Schedule({0: first, 2: second}), 0, 3)
    jax.tree.map(np.testing.assert_array_equal, switched, run(second, 2, 1))
    for name, scale in scales.items():
        assert vnmse(switched[name][0], scale * GRADIENTS[:, 0].mean(0)) < 0.1


def test_only_the_phase_that_it_is_in_is_compiled(data_mesh):
    def kinds(phase):
        schedule = dq.Schedule({0: "exact", 2: "blockint:4"})
        reduce = dq.all_reduce_gradients("data", method=schedule, phase=phase)
        mapped = jax.shard_map(
            lambda g: reduce.update(g[0], reduce.init(g[0]))[0],
            mesh=data_mesh(WORKERS),
            in_specs=P("data"),
            out_specs=P(),
        )
        text = jax.jit(mapped).lower(GRADIENTS[:, 0]).as_text()
        return "stablehlo.case" in text or "stablehlo.if" in text, "ui8" in text

    assert kinds(0) == (False, False)
    assert kinds(1) == (False, True)
    assert kinds(None) == (True, True)


def test_a_phase_records_its_own_plan_alone():
    """Those of other phases, whose states are compared, are no collectives of this program."""
    schedule = dq.Schedule({0: "ef+bf16", 1: Decaying()})
    reduce = dq.all_reduce_gradients("data", method=schedule, phase=0)
    state = jax.eval_shape(jax.vmap(reduce.init, axis_name="data"), GRADIENTS[:, 0])
    with recording() as records:
        jax.eval_shape(jax.vmap(reduce.update, axis_name="data"), GRADIENTS[:, 0], state)
    (record,) = records
    assert [bucket.method for bucket in record.plan.buckets] == [resolve_method("ef+bf16")]


@pytest.mark.parametrize(
    "phases",
    [
        *({}, {1: "bf16"}, {0: "bf16", 5: "exact", 3: "bf16"}, {0: "bf16", 2.5: "exact"}),
        *({0: "bf16", "1": "exact"}, {0: "bf16", 2**31: "exact"}, "bf16", None),
    ],
)
def test_impossible_phases(phases):
    with pytest.raises(ValueError, match="phases="):
        dq.Schedule(phases)


def test_methods_of_phases_are_checked_at_once():
    with pytest.raises(ValueError, match="method='bf17'"):
        dq.Schedule({0: "bf16", 10: "bf17"})


@pytest.mark.parametrize("phase", [-1, 2, 1.0, "1", True])
def test_impossible_phase(phase):
    with pytest.raises(ValueError, match=r"phase=.* is not one of the 2"):
        dq.all_reduce_gradients("data", method=dq.Schedule({0: "bf16", 1: "exact"}), phase=phase)


def test_a_step_that_is_none_has_no_phase():
    for step in (-1, 1.5):
        with pytest.raises(ValueError, match="step="):
            dq.Schedule({0: "bf16"}).phase(step)


def test_a_schedule_is_for_the_optimizer_alone():
    schedule = dq.Schedule({0: "bf16"})
    words = r"method=Schedule.* is a schedule.*all_reduce_gradients alone.*schedule\.methods\[0\]"
    with pytest.raises(ValueError, match=words):
        dq.wire_report(jax.ShapeDtypeStruct((4096,), jnp.float32), 2, method=schedule)
    with pytest.raises(ValueError, match=words):
        dq.compress(lambda x: x, "data", method=schedule)
