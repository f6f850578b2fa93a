"""The optax transformation: a mean, a plain state, and a stream of noise that can be resumed."""

import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import METHODS, ErrorFeedback, Method, resolve_method
from tests.support.gradients import of_workers, vnmse
from tests.support.states import of_buckets, on_mesh
from tests.support.workers import STOCHASTIC, CountingZeros, Decaying, described, first, mesh_of

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


def transformation(**arguments):
    return dq.all_reduce_gradients("data", **{"method": STOCHASTIC, **arguments})


def state_of(method, tree):
    """Shapes of the first state of all workers."""
    reduce = dq.all_reduce_gradients("data", method)
    return jax.eval_shape(jax.vmap(reduce.init, axis_name="data"), tree)


def stepper(optimizer, mesh):
    """One step on a mesh: (local gradients, state, parameters) to (updates, state), replicated."""

    def local(stacked, state, params):
        return optimizer.update(first(stacked), state, params)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P())
    return jax.jit(mapped)


FEEDBACK = ErrorFeedback(inner=dq.methods.BF16())


class Reducer:
    """One bare transformation, simulated; compiled once."""

    def __init__(self, **arguments):
        self.transformation = transformation(**arguments)

        def update(state, tree):
            def local(local_tree):
                return self.transformation.update(local_tree, state)

            return jax.vmap(local, axis_name="data")(tree)

        self.update = jax.jit(update)

    def __call__(self, tree, state=None):
        """Updates and state of worker 0 after one step, from the initial state if none is given."""
        if state is None:
            state = self.transformation.init(first(tree))
        return first(self.update(state, tree))


@pytest.fixture(scope="module")
def momentum(data_mesh):
    """A chain with a state of its own, and one jitted step of it."""
    optimizer = optax.chain(transformation(seed=3), optax.sgd(1e-2, momentum=0.9))
    return optimizer, stepper(optimizer, data_mesh(NUM_WORKERS))


# ------------------------------------------------------------------------------------- the update


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


def test_the_state_is_a_plain_pytree_that_keeps_its_shape(method="mxfp8"):
    """Abstract init, init and update agree, and carry the dtypes of the gradients."""
    reduce = dq.all_reduce_gradients("data", method=method, start_step=5)
    tree = params() | {"half": jnp.ones((32, 64), jnp.bfloat16)}
    state = reduce.init(tree)
    assert described(state) == described(jax.eval_shape(reduce.init, tree))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert (state.step.dtype, int(state.step)) == (jnp.int32, 5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), tree)
    update = jax.vmap(lambda local: reduce.update(local, state), axis_name="data")
    updates, after = jax.eval_shape(update, stacked)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert described(updates) == described(stacked)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "check_vma"),
    (
        (Decaying(), True),
        (ErrorFeedback(inner=dq.methods.BF16()), True),
        (ErrorFeedback(inner=dq.methods.BF16()), False),
    ),
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else str(value),
)
def test_states_of_all_workers_lie_side_by_side(data_mesh, method, check_vma):
    """Between calls of shard_map, whatever a method remembers."""
    reduce = dq.all_reduce_gradients("data", method=method)
    init, update = on_mesh(reduce, data_mesh(2), check_vma=check_vma)
    start = init(jnp.zeros((64, 96)))
    mean, state = update(of_workers(0, 2, 64 * 96).reshape(2, 64, 96), start)
    assert mean.shape == (64, 96)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, start)
    assert jax.tree.leaves(state.method) and {len(x) for x in jax.tree.leaves(state.method)} == {2}
    pairs = zip(*map(jax.tree.leaves, (state, start)), strict=True)
    changed = [not np.array_equal(after, before) for after, before in pairs]
    assert sum(changed) >= 2  # the step, and what the method remembers


def test_every_method_with_a_state_is_among_those():
    assert not any(resolve_method(name).is_stateful for name in METHODS.own)


# ----------------------------------------------------------------------------------------- metrics


def test_metrics_are_means_over_buckets_by_their_coordinates():
    """Half of one bucket is zero, and nothing of a smaller one."""
    rng = np.random.default_rng(0)
    tree = {"large": rng.normal(size=(2, 10 * 256)), "small": rng.normal(size=(2, 6 * 256))}
    tree = jax.tree.map(lambda leaf: leaf.astype(np.float32), tree)
    tree["large"][:, 5 * 256 :] = 0
    # What is exact has no part in it.
    tree["exact"] = rng.normal(size=(2, 100)).astype(np.float32)
    method = dq.Compression(CountingZeros(), bucket_bytes=1, bucketing="in_order")
    reduce = dq.all_reduce_gradients("data", method)
    start = reduce.init(first(tree))
    assert start.metrics == {"zeros": 0.0}
    assert start.metrics["zeros"].dtype == np.float32
    update = jax.jit(jax.vmap(lambda local: reduce.update(local, start)[1], axis_name="data"))
    state = update(tree)
    assert jax.tree.structure(state) == jax.tree.structure(start)
    np.testing.assert_allclose(state.metrics["zeros"], [0.5 * 10 / 16] * 2, rtol=1e-6)


def test_metrics_are_means_over_shards():
    """Half of one shard is zero, and nothing of the other."""
    mesh = mesh_of(data=2, model=2)
    values = np.ones((2, 2, 4096), np.float32)
    values[:, 1, 2048:] = 0
    compression = dq.Compression(CountingZeros(), specs=P("model"))
    reduce = dq.all_reduce_gradients("data", method=compression)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    def metrics(stacked):
        return reduce.update(stacked[0], reduce.init(stacked[0]))[1].metrics

    sharded = jax.NamedSharding(mesh, P("data", "model"))
    found = metrics(jax.device_put(values, sharded))
    np.testing.assert_allclose(found["zeros"], 0.25, rtol=1e-6)


def test_a_method_without_metrics_has_none():
    reduce = Reducer(method="bf16")
    _, state = reduce(gradients(0))
    assert state.metrics == reduce.transformation.init(params()).metrics == {}
    # Without anything to compress, the metrics are zero.
    tiny = dq.all_reduce_gradients("data", method=CountingZeros())
    _, state = jax.vmap(lambda g: tiny.update(g, tiny.init(g)), axis_name="data")(jnp.ones((2, 8)))
    assert state.metrics["zeros"].tolist() == [0, 0]


# --------------------------------------------------------------------------------- steps and seeds


def test_every_step_has_its_own_noise_and_the_seed_fixes_all_of_it():
    tree = gradients(0)
    reduce = Reducer(seed=1)
    one, state = reduce(tree)
    assert int(state.step) == 1
    second, _ = reduce(tree, state)
    again, _ = reduce(tree)
    other_seed, _ = Reducer(seed=2)(tree)
    jax.tree.map(np.testing.assert_array_equal, again, one)
    assert np.any(second["kernel"] != one["kernel"])
    assert np.any(other_seed["kernel"] != one["kernel"])
    np.testing.assert_array_equal(second["bias"], one["bias"])  # exact: no noise
    # A run that starts at step 1 takes that step as the run that got there does.
    late, _ = Reducer(seed=1, start_step=1)(tree)
    jax.tree.map(np.testing.assert_array_equal, late, second)


@pytest.mark.parametrize("step", [-1, 2.5, "3", 2**31])
def test_a_first_step_that_is_none_is_refused(step):
    with pytest.raises(ValueError, match=re.escape(f"start_step={step!r}")):
        dq.all_reduce_gradients("data", start_step=step)


# ------------------------------------------------------------------------- buckets of the states


@pytest.mark.parametrize(
    ("method", "sizes"),
    (
        (FEEDBACK, [64 * 96 + 40 * 128]),
        ({"kernel": "uncompressed", "": FEEDBACK}, [40 * 128]),
        ({"kernel": "bf16", "": FEEDBACK}, [40 * 128]),
        (dq.Compression(FEEDBACK, exact_below=6000), [64 * 96]),
        (dq.Compression(FEEDBACK, bucket_bytes=1, bucketing="in_order"), [40 * 128, 64 * 96]),
    ),
    ids=("all", "exact", "two methods", "exact_below", "buckets"),
)
def test_a_state_covers_the_buckets_that_the_options_make(method, sizes):
    """`init` and `update` plan alike: residuals of the leaves that are compressed."""
    tree = gradients(0)
    reduce = dq.all_reduce_gradients("data", method)
    state = jax.vmap(reduce.init, axis_name="data")(tree)
    shapes = [bucket.residual.shape for bucket in of_buckets(state).values()]
    assert shapes == [(4, 1, n) for n in sizes]
    updates, after = jax.jit(jax.vmap(reduce.update, axis_name="data"))(tree, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    for name, leaf in tree.items():
        assert vnmse(updates[name][0], leaf.mean(axis=0, dtype=np.float64)) < 2e-5
    assert all(np.any(bucket.residual != 0) for bucket in of_buckets(after).values())


@pytest.mark.parametrize(
    "arguments",
    (
        {"method": "ef+blockint:8"},
        {"method": lambda path, leaf: FEEDBACK},
        {"method": dq.Compression(FEEDBACK, "butterfly")},
        {"seed": 5},
        {"method": dq.Compression(FEEDBACK, unrolled_buckets=0)},
    ),
    ids=lambda arguments: min(arguments),
)
def test_what_may_change_in_a_run_with_the_same_state(arguments):
    tree = gradients(0)
    one, other = (
        dq.all_reduce_gradients("data", **{"method": FEEDBACK, **each}) for each in ({}, arguments)
    )
    state = jax.eval_shape(jax.vmap(one.init, axis_name="data"), tree)
    assert jax.eval_shape(jax.vmap(other.init, axis_name="data"), tree) == state
    _, after = jax.eval_shape(jax.vmap(other.update, axis_name="data"), tree, state)
    assert after == state


def test_a_state_of_parameters_is_one_of_gradients_in_another_dtype():
    tree = gradients(0)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
    assert state_of(FEEDBACK, tree) == state_of(FEEDBACK, narrow)


def test_names_of_states_are_the_same_in_every_process(
    method="ef+bf16", kind="ErrorFeedback", hashes=("4f8efa5c508b", "e6bcc7bdadf7")
):
    """Those of a checkpoint: no change of Python, JAX or the library may alter them."""
    tree = {"layers": [{"kernel": jnp.ones((4, 64, 96))}], "w": jnp.ones((4, 4096))}
    state = state_of(dq.Compression(method, bucket_bytes=1, bucketing="in_order"), tree)
    assert sorted(state.method) == [
        f"{kind}-layers_0_kernel-{hashes[0]}",
        f"{kind}-w-{hashes[1]}",
        "worker",
    ]


def test_a_checkpoint_of_other_leaves_is_not_restored(tmp_path):
    """Not even where no step is taken: names are a part of what libraries save."""
    tree = dict.fromkeys("abc", jnp.ones((2, 2048)))
    saved, other = (
        jax.vmap(dq.all_reduce_gradients("data", method=policy).init, axis_name="data")(tree)
        for policy in ({"[ab]": FEEDBACK, "c": "bf16"}, {"[ac]": FEEDBACK, "b": "bf16"})
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", saved)
        with pytest.raises(ValueError, match="ErrorFeedback-a_c-"):
            checkpointer.restore(tmp_path / "state", other)
    assert jax.tree.structure(restored) == jax.tree.structure(saved) != jax.tree.structure(other)
    written = flax.serialization.to_bytes(saved)
    read = flax.serialization.from_bytes(saved, written)
    assert jax.tree.structure(read) == jax.tree.structure(saved)
    with pytest.raises(ValueError, match="ErrorFeedback-a_c-"):
        flax.serialization.from_bytes(other, written)


@pytest.mark.parametrize(
    ("bucketing", "wanted"),
    (
        ("in_order", ["ErrorFeedback-0_256", "ErrorFeedback-256_512"]),
        ("striped", ["ErrorFeedback-stripe_0_of_2_tree", "ErrorFeedback-stripe_1_of_2_tree"]),
    ),
)
def test_parts_of_a_leaf_have_states_of_their_own(bucketing, wanted):
    tree = jnp.ones((2, 512, 256))
    method = dq.Compression("ef+bf16", bucket_bytes=4 * 256 * 256, bucketing=bucketing)
    heads = [name.rpartition("-")[0] for name in of_buckets(state_of(method, tree))]
    assert heads == wanted


KINDS = {
    "ef+bf16": "ErrorFeedback",
    "ef+blockint:8": "ErrorFeedback",
    Decaying(): "Decaying by half",
    Decaying(decay=0.25): "Decaying by three quarters",
    "bf16": None,
}
POLICIES = st.lists(st.sampled_from(list(KINDS)), min_size=4, max_size=4)


@given(POLICIES, POLICIES)
def test_policies_share_the_states_of_one_kind_and_the_same_leaves(one, other):
    """And no others: four equal leaves, in a bucket for each method."""
    tree = {name: jnp.ones((2, 64, 32)) for name in "abcd"}
    names, wanted = [], []
    for policy in (one, other):
        of_leaf = dict(zip("abcd", policy, strict=True))
        state = state_of(lambda path, leaf, of=of_leaf: of[path], tree)
        names.append(set(of_buckets(state)))
        buckets = {
            (method, "".join(n for n in "abcd" if of_leaf[n] == method)) for method in policy
        }
        wanted.append({(KINDS[method], leaves) for method, leaves in buckets if KINDS[method]})
        assert len(names[-1]) == len(wanted[-1])
    assert len(names[0] & names[1]) == len(wanted[0] & wanted[1])
