"""State that a backward pass returns in place of a gradient: no function sums or averages it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import training

KEY = jax.random.key(0)
WORKERS, ROWS, WIDTH, LONG = 4, 16, 32, 8
NAME = "_overwrite_with_gradient"
SLOW = pytest.mark.slow
FORMS = pytest.mark.parametrize(
    "form", ("data_parallel", pytest.param("value_and_grad", marks=SLOW))
)


def run_by(form, loss, mesh, **arguments):
    arguments = {"axis_name": "data", "method": "exact", "mesh": mesh} | arguments
    if form == "value_and_grad":
        return functools.partial(dq.value_and_grad(loss, **arguments), key=KEY)
    return jax.value_and_grad(dq.data_parallel(loss, **arguments))


def largest(x):
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def pushed(history, x):
    """A history that begins with the magnitude of an array."""
    return jnp.roll(history, 1).at[0].set(largest(x))


def rule(forward, backward):
    """An operation of an array and of a state, which has a derivative of its own."""

    @jax.custom_vjp
    def operation(x, state):
        return x

    operation.defvjp(lambda x, state: (x, forward(x, state)), backward)
    return operation


kept = rule(lambda x, s: pushed(s, x), lambda new, g: (g, new))
late = rule(lambda x, s: (x, s), lambda saved, g: (g, pushed(saved[1], saved[0])))
of_cotangent = rule(lambda x, s: s, lambda s, g: (g, pushed(s, g)))
joined = rule(lambda x, s: s, lambda s, g: (g, jnp.concatenate([largest(g)[None], s[:-1]])))
updated = rule(
    lambda x, s: s, lambda s, g: (g, lax.dynamic_update_slice(s, largest(g)[None], (1,)))
)
chosen = rule(lambda x, s: s, lambda s, g: (g, jnp.where(largest(g) > 0, largest(g), s)))
of_batch = rule(lambda x, s: largest(x) + jnp.zeros_like(s), lambda new, g: (g, new))
moved = rule(
    lambda x, s: s,
    lambda s, g: (g, lax.scan(lambda last, each: (each, last), jnp.float32(0), s)[1]),
)
STATES = {
    "in the forward pass": kept,
    "of the batch alone": of_batch,
    "moved in a loop": moved,
    "in the backward pass": late,
    "of cotangents": of_cotangent,
    "of cotangents, joined": joined,
    "of cotangents, updated": updated,
    "of cotangents, or as it was": chosen,
}


def plain(operation, params, x):
    return jnp.mean((operation(x, params["state"]) @ params["w"]) ** 2)


def checkpointed(operation, params, x):
    return jax.checkpoint(functools.partial(plain, operation))(params, x)


def jitted(operation, params, x):
    return jax.jit(functools.partial(plain, operation))(params, x)


def cast(operation, params, x):
    """In 16 bits, with a scale of the loss."""
    low = {"state": params["state"], "w": params["w"].astype(jnp.bfloat16)}
    return 8 * plain(operation, low, x.astype(jnp.bfloat16)).astype(jnp.float32)


def in_a_branch(operation, params, x):
    used = lambda: operation(x, params["state"])  # noqa: E731
    x = lax.cond(params["w"][0, 0] > 0, used, used)
    return jnp.mean((x @ params["w"]) ** 2)


def in_a_scan(operation, params, x):
    """Of one array in each turn, as of layers, or of the batch."""

    def layer(x, of_layer):
        w, state = of_layer
        return jnp.tanh(operation(x, state) @ w), None

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), (params["w"], params["state"]))
    return jnp.mean(lax.scan(layer, x, stacked)[0] ** 2)


PLACES = (plain, checkpointed, jitted, cast, in_a_branch)


def params_of(**others):
    w = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4
    return {"w": w, "state": np.ones(LONG, np.float32)} | others


def rows():
    return np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32)


# ------------------------------------------------------------------------- by the flow of data


@pytest.mark.sampled(8)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state", STATES)
@FORMS
def test_a_state_is_refused_under_any_name(form, state, place, data_mesh):
    run = run_by(form, functools.partial(place, STATES[state]), data_mesh(WORKERS))
    with pytest.raises(
        ValueError, match=r"tree\['state'\] is no gradient: .*pmax\(state, 'data'\)"
    ):
        run(params_of(), rows())


@pytest.mark.parametrize("form", ("data_parallel", "value_and_grad"))
@pytest.mark.parametrize(
    "arguments",
    (
        {"transform": "vmap"},
        {"check_vma": True},
        {"num_targets": lambda params, x: x.shape[0]},
        {"argnums": (1, 0), "in_specs": {0: None}},
    ),
    ids=("vmap", "checked", "targets", "several arguments"),
)
def test_every_form_of_the_call_refuses_it(form, arguments, data_mesh):
    if "argnums" in arguments:
        loss = lambda w, state, x: plain(kept, {"w": w, "state": state}, x)  # noqa: E731
        args = (params_of()["w"], params_of()["state"], rows())
    else:
        loss, args = functools.partial(plain, kept), (params_of(), rows())
    with pytest.raises(ValueError, match="is no gradient"):
        run_by(form, loss, data_mesh(WORKERS), **arguments)(*args)


@FORMS
def test_states_of_the_layers_of_a_scan_are_refused(form, data_mesh):
    stacked = params_of(w=np.stack([params_of()["w"]] * 2), state=np.ones((2, LONG), np.float32))

    def loss(params, x):
        layer = lambda x, each: (jnp.tanh(kept(x, each["state"]) @ each["w"]), None)  # noqa: E731
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    with pytest.raises(ValueError, match=r"\['state'\] is no gradient"):
        run_by(form, loss, data_mesh(WORKERS))(stacked, rows())


clipped = rule(lambda x, s: None, lambda _, g: (jnp.clip(g, -1e-3, 1e-3), jnp.zeros(LONG)))
by_norm = rule(
    lambda x, s: s, lambda s, g: (g * jnp.minimum(1, 1 / jnp.linalg.norm(g)), jnp.zeros_like(s))
)


def of_rows(g, state):
    """A gradient of as many numbers as the state has."""
    return g.ravel()[: state.size].astype(state.dtype)


scaled = rule(lambda x, s: s, lambda s, g: (g * s[0].astype(g.dtype), of_rows(g, s) * s))
finite = rule(lambda x, s: s, lambda s, g: (jnp.nan_to_num(g), jnp.where(s > 0, of_rows(g, s), 0)))
padded = rule(
    lambda x, s: s,
    lambda s, g: (g, jnp.zeros_like(s).at[jnp.argmax(s)].set(of_rows(g, s)[0])),
)
in_parts = rule(
    lambda x, s: s,
    lambda s, g: (g, jnp.concatenate([of_rows(g, s)[2:], jnp.zeros(1), of_rows(g, s)[:1]])),
)
ZEROS = np.zeros(LONG, np.float32)
none = rule(lambda x, s: None, lambda _, g: (g, jnp.asarray(ZEROS)))
by_scale = rule(  # made from a state, of which it is no part
    lambda x, s: s,
    lambda s, g: (g / jnp.max(pushed(s, g)).astype(g.dtype), jnp.zeros_like(s)),
)


@jax.custom_jvp
def straight_through(x, state):
    return jnp.round(8 * x) / 8


straight_through.defjvps(lambda t, out, x, state: t, None)
GRADIENTS = {
    "clipped by value": clipped,
    "clipped by norm": by_norm,
    "scaled by the state": scaled,
    "finite": finite,
    "straight through": straight_through,
    "padded": padded,
    "in parts": in_parts,
    "none for the state": none,
    "scaled by a magnitude": by_scale,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", (*PLACES, in_a_scan))
@pytest.mark.parametrize("name", GRADIENTS)
@FORMS
def test_gradients_of_other_rules_are_averaged(form, name, place, data_mesh):
    """Of rules that are not linear too: `data_parallel` gives each worker a cotangent of its share,
    and `value_and_grad` one of its own mean.
    """
    loss = functools.partial(place, GRADIENTS[name])
    _, grads = run_by(form, loss, data_mesh(WORKERS))(params_of(), rows())
    parts = rows().reshape(WORKERS, -1, WIDTH)
    share = 1 / WORKERS if form == "data_parallel" else 1
    grad = jax.grad(lambda params, x: share * loss(params, x))
    each = jax.vmap(grad, in_axes=(None, 0))(params_of(), parts)
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0) / share, each)
    for ours, other in zip(jax.tree.leaves(grads), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(ours, other, rtol=2e-2 if place is cast else 1e-4, atol=1e-6)
    assert np.any(grads["w"])


@FORMS
def test_leaves_that_the_loss_does_not_use_have_zeros(form, data_mesh):
    loss = lambda params, x: plain(clipped, params, x)  # noqa: E731
    params = params_of(unused=np.ones(3, np.float32), frozen=np.ones((2, 2), np.float32))
    _, grads = run_by(form, loss, data_mesh(WORKERS))(params, rows())
    assert not np.any(grads["unused"]) and not np.any(grads["frozen"]) and np.any(grads["w"])


# ------------------------------------------------------------------------------------- by name


def tree_of(state=(1024,), dtype=jnp.float32):
    return {"params": {"w": jnp.ones((32, 64))}, NAME: {"dense": jnp.ones(state, dtype)}}


def in_map(function, mesh, out=P()):
    return jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=out, check_vma=False)


def of_gradients(tree, method="dynamiq"):
    reduction = dq.all_reduce_gradients("data", method=method)
    return reduction.update(tree, reduction.init(tree))[0]


def of_cast(tree):
    cast = lambda tree: dq.pcast(tree, "data", to="varying", key=KEY)  # noqa: E731
    return jax.grad(lambda tree: sum(leaf.sum() for leaf in jax.tree.leaves(cast(tree))))(tree)


def of_local_sgd(tree):
    step = training.LocalSGD(axis_name="data", every=1)
    return step.update(tree, step.init(tree), due=step.due(0))[0]


def of_pipelined(tree):
    step = training.Pipelined(optimizer=optax.sgd(0.1), axis_name="data")
    return step.scatter(tree, step.gather(step.init(tree))).shards


IN_MAPS = {
    "psum": lambda tree: dq.psum(tree, "data", key=KEY),
    "pmean": lambda tree: dq.pmean(tree, "data", key=KEY),
    "pmean, uncompressed": lambda tree: dq.pmean(
        tree, "data", key=KEY, method={".*": "uncompressed"}
    ),
    "pmean, metrics": lambda tree: dq.pmean(tree, "data", key=KEY, with_metrics=True)[0],
    "psum_scatter": lambda tree: dq.psum_scatter(tree, "data", key=KEY, tiled=True),
    "pcast": of_cast,
    "all_reduce_gradients": of_gradients,
    "all_reduce_gradients, with a state": functools.partial(of_gradients, method="ef+dynamiq"),
    "LocalSGD": of_local_sgd,
    "Pipelined": of_pipelined,
}


@pytest.mark.parametrize("state", ((1024,), (1024, 64), (4,)), ids=str)
@pytest.mark.parametrize("name", IN_MAPS)
def test_no_function_averages_a_leaf_of_that_name(name, state, data_mesh):
    """Of any size: a mean of the exact ones would have no meaning either."""
    with pytest.raises(ValueError, match=rf"tree\['{NAME}'\]\['dense'\] is no gradient"):
        jax.eval_shape(in_map(lambda: IN_MAPS[name](tree_of(state)), data_mesh(WORKERS)))


def test_replicas_have_none_of_that_name(data_mesh):
    mesh, tree = data_mesh(WORKERS), tree_of()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * WORKERS), tree)
    with pytest.raises(ValueError, match="is no gradient"):
        dq.mean_of_replicas(stacked, "data", mesh=mesh, key=KEY)

    def total(tree):
        replicas = dq.broadcast_to_replicas(tree, "data", mesh=mesh)
        return sum(leaf.sum() for leaf in jax.tree.leaves(replicas))

    with pytest.raises(ValueError, match="is no gradient"):
        jax.grad(total)(tree)


def test_what_is_no_mean_of_a_state_is_allowed(data_mesh):
    """Gathers, and means of integers."""
    mesh = data_mesh(WORKERS)
    gather = lambda: dq.all_gather(tree_of(), "data", key=KEY, tiled=True)  # noqa: E731
    gathered = jax.eval_shape(in_map(gather, mesh))
    assert gathered[NAME]["dense"].shape == (WORKERS * 1024,)
    count = lambda: dq.pmean(tree_of(dtype=jnp.int32), "data", key=KEY)  # noqa: E731
    assert jax.eval_shape(in_map(count, mesh))[NAME]["dense"].shape == (1024,)


class Quantized(linen.Module):
    """Two layers of flax in FP8."""

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.Dense(WIDTH, dot_general_cls=linen.Fp8DirectDotGeneralOp)(x)
        return x


def fp8_loss(variables, x):
    return jnp.mean(Quantized().apply(variables, x) ** 2)


@pytest.mark.parametrize("form", ("data_parallel", "value_and_grad"))
def test_layers_of_flax_are_refused_by_name(form, data_mesh):
    with pytest.raises(ValueError, match=rf"tree\['{NAME}'\].* is no gradient"):
        run_by(form, fp8_loss, data_mesh(WORKERS))(Quantized().init(KEY, rows()), rows())


def test_the_remedy_is_the_state_of_one_device(data_mesh):
    """Of the inputs and the weights. Cotangents are those of a worker's mean, n times larger."""

    def local(variables, x):
        grads = jax.grad(fp8_loss)(variables, x)
        state = lax.pmax(grads.pop(NAME), "data")
        return dq.pmean(grads, "data", key=KEY), state

    step = jax.shard_map(
        local, mesh=data_mesh(WORKERS), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    variables = Quantized().init(KEY, rows())
    grads, state = jax.jit(step)(variables, rows())
    expected = jax.grad(fp8_loss)(variables, rows())
    for path, leaf in jax.tree.leaves_with_path(state):
        of_one = functools.reduce(lambda tree, key: tree[key.key], path, expected[NAME])
        factor = WORKERS if path[-1].key == "output_grad_amax_history" else 1
        is_of_batch = path[0].key == "Dense_0" and factor == 1
        np.testing.assert_allclose(leaf, factor * of_one, rtol=1e-6 if is_of_batch else 0.2)
        assert leaf[0] > 0
    assert dq.vnmse(grads["params"], expected["params"]) < 0.02
