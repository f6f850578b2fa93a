"""The optax transformation: a mean, a plain state, and a stream of noise that can be resumed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, ErrorFeedback, OmniReduce, resolve_method
from tests.support.gradients import of_workers, vnmse
from tests.support.workers import TWO_CLASSES, simulated

NUM_WORKERS = 4
SHAPES = {"kernel": (64, 96), "bias": (32,), "embedding": (40, 128)}


def params():
    return {name: jnp.full(shape, 0.1) for name, shape in SHAPES.items()}


def gradients(step: int):
    """[NUM_WORKERS, *shape] for every leaf."""
    flat = of_workers(step, NUM_WORKERS, sum(np.prod(shape) for shape in SHAPES.values()))
    ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
    parts = np.split(flat, ends, axis=1)
    return {
        name: part.reshape(NUM_WORKERS, *shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


def transformation(**options):
    return dq.all_reduce_gradients("data", **{"method": TWO_CLASSES, **options})


def stepper(optimizer, mesh):
    """One step on a mesh: (local gradients, state, parameters) to (updates, state), replicated."""

    def local(stacked, state, params):
        return optimizer.update(jax.tree.map(lambda leaf: leaf[0], stacked), state, params)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    return jax.jit(mapped)


class Reducer:
    """One bare transformation, simulated; compiled once."""

    def __init__(self, **options):
        self.transformation = transformation(**options)

        def update(state, tree):
            def local(local_tree):
                return self.transformation.update(local_tree, state)

            return jax.vmap(local, axis_name="data")(tree)

        self.update = jax.jit(update)

    def __call__(self, tree, state=None):
        """Updates and state of worker 0 after one step, from the initial state if none is given."""
        if state is None:
            state = self.transformation.init(jax.tree.map(lambda leaf: leaf[0], tree))
        return jax.tree.map(lambda leaf: leaf[0], self.update(state, tree))


def assert_same_bits(ours, expected):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def momentum(data_mesh):
    """A chain with a state of its own, and one jitted step of it."""
    optimizer = optax.chain(transformation(seed=3), optax.sgd(1e-2, momentum=0.9))
    return optimizer, stepper(optimizer, data_mesh(NUM_WORKERS))


def run(step, state, params, first: int, last: int):
    """Parameters, state and all updates after steps `first .. last`."""
    history = []
    for index in range(first, last):
        updates, state = step(gradients(index), state, params)
        params = optax.apply_updates(params, updates)
        history.append(updates)
    return params, state, history


# ------------------------------------------------------------------------------------- the update


def test_updates_are_the_mean_of_the_gradients():
    tree = gradients(0)
    updates, _ = Reducer()(tree)
    for name, leaf in tree.items():
        error = vnmse(updates[name], leaf.mean(axis=0, dtype=np.float64))
        assert error < 1e-12 if name == "bias" else 1e-6 < error < 5e-3


def test_the_chain_is_the_mean_followed_by_the_rest(momentum):
    optimizer, step = momentum
    updates, state = step(gradients(0), optimizer.init(params()), params())
    mean, _ = Reducer(seed=3)(gradients(0))
    rest = optax.sgd(1e-2, momentum=0.9)
    expected, after = rest.update(mean, rest.init(params()))
    for ours, theirs in zip(
        jax.tree.leaves((updates, state[1])), jax.tree.leaves((expected, after)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# --------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize("name", [name for name in METHODS if not resolve_method(name).is_stateful])
def test_the_state_is_a_plain_pytree_that_keeps_its_shape(name):
    """Conformance: abstract init, init and update agree, and carry the dtypes of the gradients."""
    reduce = dq.all_reduce_gradients("data", method=name, start_step=5)
    tree = params() | {"half": jnp.ones((32, 64), jnp.bfloat16)}

    def init(tree):  # a method that carries state wants the axis
        return jax.vmap(lambda _: reduce.init(tree), axis_name="data", out_axes=None)(jnp.ones(2))

    state = init(tree)
    abstract = jax.eval_shape(init, tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), tree)
    updates, after = jax.eval_shape(
        jax.vmap(lambda local: reduce.update(local, state), axis_name="data"), stacked
    )
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(
        lambda x: (x.shape, x.dtype), stacked
    )


def test_a_checkpoint_resumes_the_run_bit_for_bit(momentum, tmp_path):
    optimizer, step = momentum
    _, _, uninterrupted = run(step, optimizer.init(params()), params(), 0, 4)
    half, state, before = run(step, optimizer.init(params()), params(), 0, 2)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step_2", {"params": half, "state": state})
    abstract = jax.eval_shape(lambda: {"params": params(), "state": optimizer.init(params())})
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "step_2", abstract)
    assert_same_bits(restored, {"params": half, "state": state})
    _, _, after = run(step, restored["state"], restored["params"], 2, 4)
    assert_same_bits(before + after, uninterrupted)


# --------------------------------------------------------------------------------- steps and seeds


@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
@pytest.mark.parametrize(
    "method",
    (
        *(resolve_method(name) for name in METHODS if resolve_method(name).is_stateful),
        ErrorFeedback(method=OmniReduce()),
    ),
    ids=lambda method: type(method).__name__,
)
def test_states_of_all_workers_lie_side_by_side(data_mesh, method, check_vma):
    """Between calls of shard_map, whatever a method remembers."""
    reduce = dq.all_reduce_gradients("data", method=method)
    specs = dq.AllReduceState(step=P(), method=P("data"))
    options = {"mesh": data_mesh(2), "check_vma": check_vma}
    init = jax.shard_map(reduce.init, in_specs=P(), out_specs=specs, **options)
    update = jax.shard_map(
        reduce.update, in_specs=(P("data"), specs), out_specs=(P(), specs), **options
    )
    start = jax.jit(init)(jnp.zeros((64, 96)))
    mean, state = jax.jit(update)(of_workers(0, 2, 64 * 96).reshape(128, 96), start)
    assert mean.shape == (64, 96)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)
    assert jax.tree.leaves(state.method) and {len(x) for x in jax.tree.leaves(state.method)} == {2}
    pairs = zip(*map(jax.tree.leaves, (state, start)), strict=True)
    changed = [not np.array_equal(after, before) for after, before in pairs]
    assert sum(changed) >= 2  # the step, and what the method remembers


def test_every_step_has_its_own_noise_and_the_seed_fixes_all_of_it():
    tree = gradients(0)
    reduce = Reducer(seed=1)
    first, state = reduce(tree)
    assert int(state.step) == 1
    second, _ = reduce(tree, state)
    again, _ = reduce(tree)
    other_seed, _ = Reducer(seed=2)(tree)
    assert_same_bits(again, first)
    assert np.any(second["kernel"] != first["kernel"])
    assert np.any(other_seed["kernel"] != first["kernel"])
    np.testing.assert_array_equal(second["bias"], first["bias"])  # exact: no noise
    # A run that starts at step 1 takes that step as the run that got there does.
    late, _ = Reducer(seed=1, start_step=1)(tree)
    assert_same_bits(late, second)


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize(
    "mask",
    (
        {"layer": {"kernel": True, "bias": True}, "embedding": False},
        {"layer": True, "embedding": False},
        lambda tree: {
            "layer": jax.tree.map(lambda x: x.ndim > 1, tree["layer"]),
            "embedding": False,
        },
    ),
    ids=("tree", "prefix", "callable"),
)
def test_masked_leaves_are_averaged_exactly(mask):
    leaves = gradients(0)
    tree = {
        "layer": {"kernel": leaves["kernel"], "bias": leaves["bias"]},
        "embedding": leaves["embedding"],
    }
    updates, _ = Reducer(mask=mask)(tree)
    exact = simulated(lambda _, local: lax.pmean(local, "data"))(jax.random.key(0), tree)
    np.testing.assert_array_equal(updates["embedding"], exact["embedding"][0])
    assert np.any(updates["layer"]["kernel"] != exact["layer"]["kernel"][0])
    # Nothing else changes: the compressed leaf is reduced as if it were alone.
    alone, _ = Reducer()({"layer": tree["layer"]})
    assert_same_bits(updates["layer"], alone["layer"])


@pytest.mark.parametrize("flag", (True, False))
def test_one_flag_masks_all_or_nothing(flag):
    updates, _ = Reducer(mask=flag)(gradients(0))
    exact = gradients(0)["kernel"].mean(axis=0)
    assert np.allclose(updates["kernel"], exact, rtol=1e-5, atol=1e-9) != flag


def test_a_mask_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="prefix"):
        Reducer(mask={"kernel": True})(gradients(0))
