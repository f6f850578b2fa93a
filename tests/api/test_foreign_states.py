"""States of methods belong to their workers: those of another one never enter a sum."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._plan.state_names import check_names
from dynamiq_jax.methods import ErrorFeedback, Method
from dynamiq_jax.training import LocalSGD
from tests.support.gradients import of_workers
from tests.support.states import SPECS, of_buckets, on_mesh
from tests.support.workers import Decaying, Largest, over

WORKERS = 3
FEEDBACK = ErrorFeedback(inner=Largest())


def gradients_of(workers, seed=0):
    return of_workers(seed, workers, 64 * 64).reshape(workers, 64, 64)


def on_workers(method):
    """Functions of all workers: to a first state, and to a mean and the next state."""
    reduce = dq.all_reduce_gradients("data", method=method)
    return [jax.jit(jax.vmap(each, axis_name="data")) for each in (reduce.init, reduce.update)]


class Run:
    """Two steps of a method on virtual workers, and the third one from any states."""

    def __init__(self, method: Method):
        init, self._update = on_workers(method)
        self.before = self.start = init(gradients_of(WORKERS))
        for seed in range(2):
            _, self.before = self._update(gradients_of(WORKERS, seed), self.before)

    def third(self, method_states):
        """Return the third mean of all workers, and the state after it."""
        return self._update(gradients_of(WORKERS, 2), self.before._replace(method=method_states))


@pytest.fixture(scope="module", params=(FEEDBACK, Decaying()), ids=lambda m: type(m).__name__)
def run(request):
    return Run(request.param)


@pytest.mark.sampled(2)
@given(sources=st.lists(st.integers(0, WORKERS - 1), min_size=WORKERS, max_size=WORKERS))
def test_workers_go_on_from_their_own_states_or_all_from_first_ones(run, sources):
    """Whichever worker's states each of them gets, by a swap or by a copy."""
    given_states = jax.tree.map(lambda leaf: leaf[np.array(sources)], run.before.method)
    are_own = sources == [*range(WORKERS)]
    mean, after = run.third(given_states)
    wanted, state = run.third(run.before.method if are_own else run.start.method)
    np.testing.assert_array_equal(mean, wanted)
    jax.tree.map(np.testing.assert_array_equal, after.method, state.method)
    foreign = sum(source != worker for worker, source in enumerate(sources))
    np.testing.assert_allclose(after.metrics["reset_states"], [foreign / WORKERS] * WORKERS)


def test_states_matter(run):
    """Otherwise the law above would hold for states that are never read."""
    one, other = (run.third(states)[0] for states in (run.before.method, run.start.method))
    assert np.any(one != other)


@pytest.mark.parametrize(
    ("spec", "check_vma"), ((P("data"), True), (P("data"), False), (P(), False)), ids=str
)
def test_a_checkpoint_of_one_worker_shows(data_mesh, spec, check_vma):
    """Without types, P() passes all states, but what is saved is that of worker 0."""
    mesh, gradients = data_mesh(4), gradients_of(4)
    reduce = dq.all_reduce_gradients("data", method=FEEDBACK)
    start, update = on_mesh(reduce, mesh, SPECS._replace(method=spec), check_vma=check_vma)
    state = start(gradients[0])
    for _ in range(3):
        _, state = update(gradients, state)
        assert state.metrics["reset_states"] == 0
    restored = jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf), NamedSharding(mesh, leaf.sharding.spec)),
        state,
    )
    (on, _), (again, after) = update(gradients, state), update(gradients, restored)
    if spec == P("data"):
        np.testing.assert_array_equal(on, again)
        assert after.metrics["reset_states"] == 0
    else:
        assert after.metrics["reset_states"] == 0.75
        first, _ = update(gradients, start(gradients[0])._replace(step=state.step))
        np.testing.assert_array_equal(again, first)


def test_a_state_of_another_type_is_an_error():
    """As a checkpoint has it that is read without a target."""
    for state in (None, {"step": 0}):
        with pytest.raises(TypeError, match=r"not an AllReduceState\. Give the result of init"):
            dq.all_reduce_gradients("data").update({"w": jnp.ones(3)}, state)


def test_states_of_all_phases_begin_anew_together(data_mesh):
    """A record is about those of other phases, too, which one of them does not read."""
    rest = {".*": "uncompressed"}
    schedule = dq.Schedule({0: {"w": "ef+dynamiq:3"} | rest, 2: {"v": "ef+dynamiq:3"} | rest})
    reduce, mesh = dq.all_reduce_gradients("data", method=schedule), data_mesh(4)
    gradients = {"w": gradients_of(4), "v": gradients_of(4, 1)}
    start, update = on_mesh(reduce, mesh, SPECS._replace(method=P()), check_vma=False)
    state = first = start(jax.tree.map(lambda leaf: leaf[0], gradients))
    for _ in range(3):
        _, state = update(gradients, state)
    whole = NamedSharding(mesh, P())
    restored = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), whole), state)
    _, after = update(gradients, restored)
    of_w, of_v = sorted(of_buckets(after), key=lambda name: "-v-" in name)

    def residuals(state, name):
        (leaf,) = jax.tree.leaves(state.method[name])
        return np.stack([shard.data for shard in leaf.addressable_shards])

    assert np.any(residuals(state, of_w))
    np.testing.assert_array_equal(residuals(after, of_w), residuals(first, of_w))
    assert np.all(np.any(residuals(after, of_v), axis=(1, 2)))


def test_workers_of_several_axes():
    """A swap inside a host is one too."""
    axes, gradients = ("hosts", "local"), of_workers(0, 4, 64 * 64).reshape(2, 2, 64, 64)
    init, update = (over(axes, fn) for fn in dq.all_reduce_gradients(axes, method=FEEDBACK))
    _, state = update(gradients, init(gradients))
    for turn, axis in itertools.product((0, 1), (0, 1)):
        moved = jax.tree.map(lambda leaf, a=axis, t=turn: jnp.roll(leaf, t, a), state.method)
        _, after = update(gradients, state._replace(method=moved))
        np.testing.assert_array_equal(after.metrics["reset_states"], np.full((2, 2), turn))


def test_states_of_another_number_of_workers():
    """The first rows of a checkpoint of more workers."""
    (init, update), gradients = on_workers(FEEDBACK), gradients_of(4)
    _, state = update(gradients, init(gradients))
    _, after = update(gradients[:2], jax.tree.map(lambda leaf: leaf[:2], state))
    np.testing.assert_array_equal(after.metrics["reset_states"], [1, 1])


def test_states_without_a_record():
    (init, update), gradients = on_workers(FEEDBACK), gradients_of(2)
    state = init(gradients)
    old = {name: of for name, of in state.method.items() if name != "worker"}
    with pytest.raises(ValueError, match=r"no 'worker'.*\*\*init\(params\)\.method"):
        update(gradients, state._replace(method=old))
    joined = state._replace(method={**state.method, **old})  # the remedy
    update(gradients, joined)


@pytest.mark.parametrize("swapped", (False, True), ids=("own", "of the other"))
def test_local_sgd_resets_them_too(swapped):
    local_sgd = LocalSGD(axis_name="data", every=1, method=FEEDBACK)
    params = gradients_of(2)
    update = jax.jit(jax.vmap(local_sgd.update, axis_name="data"))
    start = jax.vmap(local_sgd.init, in_axes=None, axis_name="data", axis_size=2)(params[0])
    _, state = update(params, start)
    given_states = jax.tree.map(lambda leaf: leaf[::-1] if swapped else leaf, state.method)
    cases = start.method, state.method
    wanted, other = cases if swapped else reversed(cases)
    found, wanted, other = (
        update(params, state._replace(method=states))[0] for states in (given_states, wanted, other)
    )
    np.testing.assert_array_equal(found, wanted)
    assert np.any(found != other)


@pytest.mark.parametrize(
    ("number", "said"), [(3, "'a', 'b', 'c', but"), (5, "'a', 'b', 'c' and 2 more, but")]
)
def test_three_states_that_do_not_belong_are_named(number, said):
    states = dict.fromkeys("abcde"[:number])
    with pytest.raises(ValueError, match=f"state has {said} the leaves need 'w'"):
        check_names("state", states, ["w"], user="the leaves", remedy="Call init.")


@pytest.mark.parametrize("after", (2, 1))
def test_states_of_more_workers_are_refused_with_the_way_to_go_on(data_mesh, after):
    """With the specs that a user has to give: the number of workers alone is another."""
    reduce = dq.all_reduce_gradients("data", method=FEEDBACK)
    (before, _), (init, update) = (on_mesh(reduce, data_mesh(n)) for n in (4, after))
    params, gradients = jnp.ones((64, 64)), gradients_of(after)
    state = jax.tree.map(np.asarray, before(params))
    words = r"another number of workers.*init\(params\)\._replace\(step=state\.step\)"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(update, gradients, state)
    anew = init(params)._replace(step=np.asarray(state.step))
    jax.eval_shape(update, gradients, anew)
