"""dq.value_and_grad against jax.value_and_grad of the whole batch on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC

NUM_WORKERS, BATCH, IN, HIDDEN, OUT = 4, 32, 48, 96, 16
KEY = jax.random.key(0)


def batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, IN)).astype(np.float32)
    return x, np.sin(x @ rng.standard_normal((IN, OUT))).astype(np.float32)


def plain_params():
    rng = np.random.default_rng(1)

    def matrix(rows, columns):
        return jnp.asarray(rng.standard_normal((rows, columns)).astype(np.float32) * 0.1)

    return {"in": matrix(IN, HIDDEN), "bias": jnp.zeros(HIDDEN), "out": matrix(HIDDEN, OUT)}


def plain_loss(params, x, y):
    hidden = jnp.tanh(x @ params["in"] + params["bias"][None, :])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(OUT)(jnp.tanh(linen.Dense(HIDDEN)(x)))


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def linen_model():
    model = Dense()
    params = model.init(jax.random.key(2), jnp.zeros((1, IN)))
    return params, lambda params, x, y: jnp.mean((model.apply(params, x) - y) ** 2)


def nnx_model():
    graph, state = nnx.split(Layers(nnx.Rngs(0)))
    return state, lambda state, x, y: jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)


MODELS = {
    "plain": lambda: (plain_params(), plain_loss),
    "linen": linen_model,
    "nnx": nnx_model,
}


@functools.cache
def model(name: str):
    return MODELS[name]()


def close(ours, expected, *, error: float = 0.0):
    """Equal up to float32, or with a vNMSE between a hundredth of `error` and `error`."""
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    distance = float(dq.vnmse(ours, expected))
    assert error / 100 <= distance <= (error or 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_without_compression_it_is_the_gradient_of_the_whole_batch(data_mesh, name):
    params, loss_fn = model(name)
    grad_fn = dq.value_and_grad(
        loss_fn, mesh=data_mesh(NUM_WORKERS), axis_name="data", method="exact"
    )
    loss, grads = jax.jit(grad_fn)(params, *batch(), key=KEY)
    expected_loss, expected = jax.value_and_grad(loss_fn)(params, *batch())
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    close(grads, expected)


def test_with_compression_only_the_gradients_differ(data_mesh):
    grad_fn = dq.value_and_grad(
        plain_loss, mesh=data_mesh(NUM_WORKERS), axis_name="data", method=STOCHASTIC
    )
    loss, grads = jax.jit(grad_fn)(plain_params(), *batch(), key=KEY)
    expected_loss, expected = jax.value_and_grad(plain_loss)(plain_params(), *batch())
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    close(grads, expected, error=1e-4)


def test_the_key_fixes_the_noise_and_every_device_gets_the_result(data_mesh):
    grad_fn = jax.jit(
        dq.value_and_grad(
            plain_loss, mesh=data_mesh(NUM_WORKERS), axis_name="data", method=STOCHASTIC
        )
    )
    first, again, other = (
        grad_fn(plain_params(), *batch(), key=jax.random.key(seed))[1]["in"] for seed in (0, 0, 1)
    )
    assert first.sharding.is_fully_replicated
    assert len({np.asarray(shard.data).tobytes() for shard in first.addressable_shards}) == 1
    assert len(first.addressable_shards) == NUM_WORKERS
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first) != np.asarray(other))


@pytest.mark.parametrize(
    ("options", "method", "compressed"),
    (
        (dq.Options(), {"^in$": "uncompressed", ".*": "bf16"}, {"out"}),
        (dq.Options(exact_below=2000), "bf16", {"in"}),
        (dq.Options(exact_below=0), "bf16", {"in", "bias", "out"}),
        (dq.Options(bucket_bytes=1, bucketing="in_order"), "bf16", {"in", "out"}),
    ),
    ids=("policy", "exact_below", "all", "bucket_bytes"),
)
def test_options_say_which_gradients_are_exact_and_how_large_buckets_are(
    data_mesh, options, method, compressed
):
    grad_fn = dq.value_and_grad(
        plain_loss, mesh=data_mesh(NUM_WORKERS), axis_name="data", method=method, options=options
    )
    program = jax.jit(grad_fn).lower(plain_params(), *batch(), key=KEY).compile()
    _, grads = program(plain_params(), *batch(), key=KEY)
    expected = jax.grad(plain_loss)(plain_params(), *batch())
    for name, grad in grads.items():
        close(grad, expected[name], error=1e-5 if name in compressed else 0)
    rings = [c for c in collectives(program.as_text()) if c.kind == "collective-permute"]
    assert len(rings) == (2 if options.bucket_bytes == 1 else 1)


def test_aux_is_averaged_exactly(data_mesh):
    def loss_fn(params, x, y):
        loss = plain_loss(params, x, y)
        return loss, {"copy": loss, "inputs": jnp.mean(x, axis=0), "constant": jnp.float32(7)}

    grad_fn = exact_grad_fn(data_mesh, loss_fn, has_aux=True, aux="mean")
    x, y = batch()
    (loss, aux), grads = jax.jit(grad_fn)(plain_params(), x, y, key=KEY)
    np.testing.assert_allclose(loss, plain_loss(plain_params(), x, y), rtol=1e-5)
    np.testing.assert_array_equal(aux["copy"], loss)
    np.testing.assert_allclose(aux["inputs"], x.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert float(aux["constant"]) == 7
    close(grads, jax.grad(plain_loss)(plain_params(), x, y))


def test_whole_arguments_are_seen_whole(data_mesh):
    """A key for dropout and a table of weights, beside a batch that is split."""

    def loss_fn(params, x, dropout_key, y, weights):
        assert x.shape == (BATCH // NUM_WORKERS, IN)
        assert weights.shape == (OUT,)
        keep = jax.random.bernoulli(dropout_key, 0.5, (HIDDEN,)).astype(jnp.float32)
        hidden = jnp.tanh(x @ params["in"] + params["bias"][None, :]) * keep[None, :]
        return jnp.mean(weights[None, :] * (hidden @ params["out"] - y) ** 2)

    def whole(params, x, dropout_key, y, weights):
        keep = jax.random.bernoulli(dropout_key, 0.5, (HIDDEN,)).astype(jnp.float32)
        hidden = jnp.tanh(x @ params["in"] + params["bias"][None, :]) * keep[None, :]
        return jnp.mean(weights[None, :] * (hidden @ params["out"] - y) ** 2)

    (x, y), weights = batch(), jnp.linspace(0.0, 1.0, OUT)
    args = plain_params(), x, jax.random.key(9), y, weights
    grad_fn = dq.value_and_grad(
        loss_fn,
        mesh=data_mesh(NUM_WORKERS),
        axis_name="data",
        method="exact",
        in_specs=(P(), P("data"), P(), None, P()),
    )
    loss, grads = jax.jit(grad_fn)(*args, key=KEY)
    expected_loss, expected = jax.value_and_grad(whole)(*args)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    close(grads, expected)


def test_a_batch_may_be_any_pytree(data_mesh):
    def loss_fn(params, data):
        return plain_loss(params, data["x"], data["y"])

    x, y = batch()
    grad_fn = dq.value_and_grad(
        loss_fn, mesh=data_mesh(NUM_WORKERS), axis_name="data", method="exact"
    )
    _, grads = jax.jit(grad_fn)(plain_params(), {"x": x, "y": y}, key=KEY)
    close(grads, jax.grad(plain_loss)(plain_params(), x, y))


@pytest.mark.parametrize("method", ("exact", "bf16"))
def test_another_axis_is_left_to_the_compiler(method):
    """Parameters sharded over "model" stay so, and the gradient is the same."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in": P(None, "model"), "bias": P("model"), "out": P("model", None)}
    params = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)),
        plain_params(),
        specs,
    )

    def loss_fn(params, x, y):
        assert x.shape == (BATCH // 4, IN)
        assert params["in"].shape == (IN, HIDDEN)  # whole: "model" belongs to the compiler
        return plain_loss(params, x, y)

    expected_loss, expected = jax.value_and_grad(plain_loss)(plain_params(), *batch())
    for inside_jit in (False, True):  # shardings of arrays are known, those of tracers are not
        grad_fn = dq.value_and_grad(
            loss_fn,
            mesh=mesh,
            axis_name="data",
            method=method,
            specs=specs if inside_jit else None,
        )
        call = jax.jit(grad_fn) if inside_jit else grad_fn
        loss, grads = call(params, *batch(), key=KEY)
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
        close(grads, expected, error=0.0 if method == "exact" else 1e-5)
        for name, grad in grads.items():
            assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)


def test_a_step_of_training_lowers_the_loss(data_mesh):
    """The sign, the scale and the structure are those that an update needs."""
    grad_fn = jax.jit(
        dq.value_and_grad(
            plain_loss, mesh=data_mesh(NUM_WORKERS), axis_name="data", method=STOCHASTIC
        )
    )
    params, losses = plain_params(), []
    for step in range(10):
        loss, grads = grad_fn(params, *batch(), key=jax.random.key(step))
        params = jax.tree.map(lambda p, g: p - np.float32(0.5) * g, params, grads)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]


def test_a_mesh_of_the_default_axis_types():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    grad_fn = dq.value_and_grad(
        lambda params, x: jnp.mean((x @ params) ** 2), mesh=mesh, axis_name="data", method="exact"
    )
    params, x = jnp.ones((8, 2)), jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    loss, grads = grad_fn(params, x, key=jax.random.key(0))
    expected = jax.value_and_grad(lambda params: jnp.mean((x @ params) ** 2))(params)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(grads, expected[1], rtol=1e-6)


@pytest.mark.parametrize("split", (False, True), ids=("whole batch", "split batch"))
def test_under_set_mesh_with_the_default_axis_types(split):
    """Shardings are part of types there. Those of the parameters are kept."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def loss(params, x):
        return jnp.mean((x @ params["w"]) ** 2), {"mean": jnp.mean(x)}

    how = {"has_aux": True, "aux": "mean", "method": "bf16"}
    grad_fn = dq.value_and_grad(loss, mesh=mesh, axis_name="data", **how)
    params = {"w": jax.random.normal(jax.random.key(0), (64, 64))}
    x = jax.random.normal(jax.random.key(1), (32, 64))
    expected = grad_fn(params, x, key=jax.random.key(2))
    with jax.set_mesh(mesh):
        params = jax.reshard(params, P(None, "model"))
        ours = grad_fn(params, jax.reshard(x, P("data")) if split else x, key=jax.random.key(2))
        assert jax.typeof(ours[1]["w"]).sharding.spec == P(None, "model")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), ours, expected)


@pytest.mark.parametrize("positions", (3, (1, -1)))
def test_static_positions_that_do_not_exist(positions):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    grad_fn = dq.value_and_grad(
        lambda params, x, y: params.sum(),
        mesh=mesh,
        axis_name="data",
        static_argnums=positions,
    )
    with pytest.raises(ValueError, match=r"static_argnums or .* Give positions from 0 to 2"):
        grad_fn(jnp.ones(4), jnp.ones(2), jnp.ones(2), key=jax.random.key(0))


# ------------------------------------------------------------------------------ kinds of arguments


def exact_grad_fn(data_mesh, loss_fn, *args, **kwargs):
    mesh = data_mesh(NUM_WORKERS)
    return dq.value_and_grad(loss_fn, *args, mesh=mesh, axis_name="data", method="exact", **kwargs)


@pytest.mark.parametrize("argnums", (1, (1,), (2, 1)))
def test_any_positions_may_be_differentiated(data_mesh, argnums):
    def loss_fn(x, params, scale, y):
        return scale["s"] * plain_loss(params, x, y)

    x, y = batch()
    args = x, plain_params(), {"s": jnp.float32(2)}, y
    grad_fn = exact_grad_fn(data_mesh, loss_fn, argnums, in_specs={"scale": P()})
    loss, grads = grad_fn(*args, key=KEY)
    expected_loss, expected = jax.value_and_grad(loss_fn, argnums)(*args)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5)
    close(grads, expected)


def test_an_own_key_of_the_loss_is_given_by_position(data_mesh):
    def loss_fn(params, x, y, key=None):
        return plain_loss(params, x, y) * (1 if key is None else jax.random.uniform(key))

    grad_fn = exact_grad_fn(data_mesh, loss_fn, in_specs={"key": P()})
    args = plain_params(), *batch()
    for own in (None, jax.random.key(3)):
        loss, _ = grad_fn(*args, own, key=KEY)
        assert float(loss) == pytest.approx(float(loss_fn(*args, own)), rel=1e-5)
    with pytest.raises(ValueError, match=r"argument 'key' too.* by position, as argument 3"):
        grad_fn(*args, key=KEY)
    with pytest.raises(ValueError, match=r"keyword-only argument 'key'.* such as dropout_key"):
        exact_grad_fn(data_mesh, lambda params, *, key: params)


def test_one_spec_is_that_of_all_positions():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss_fn(first, last, x, y):
        return plain_loss({**first, "out": last}, x, y)

    first = plain_params()
    args = first, first.pop("out"), *batch()

    def grads_with(specs):
        grad_fn = dq.value_and_grad(
            loss_fn, (0, 1), mesh=mesh, axis_name="data", method="exact", specs=specs
        )
        return jax.jit(grad_fn)(*args, key=KEY)[1]

    with pytest.raises(ValueError, match=r"specs=\{.*no entry for each of argnums=\(0, 1\)"):
        grads_with({"in": P()})
    with pytest.raises(ValueError, match=r"specs=\(.*no entry for each of argnums=\(0, 1\)"):
        grads_with((P(),))
    close(grads_with(P()), grads_with((P(), P())), error=0.0)


@pytest.mark.parametrize("transform", ("shard_map", "vmap"))
def test_arrays_without_elements_and_losses_without_parameters(data_mesh, transform):
    def loss_fn(params, x, y):
        return plain_loss(params, x, y) + jnp.sum(params["none"]), x[:, :0]

    args = plain_params() | {"none": jnp.zeros((0, 3))}, *batch()
    form = {"transform": transform, "has_aux": True, "aux": "rows"}
    (_, rows), grads = exact_grad_fn(data_mesh, loss_fn, **form)(*args, key=KEY)
    assert rows.shape == (BATCH, 0) and grads["none"].shape == (0, 3)
    grad_fn = exact_grad_fn(data_mesh, lambda params, x: 2.0, transform=transform)
    loss, grads = grad_fn(plain_params(), batch()[0], key=KEY)
    assert float(loss) == 2 and not grads["in"].any()


def test_a_batch_holds_numbers_text_and_keywords(data_mesh):
    """Scalars and keys are the same on all workers; what is not an array is static."""
    traced = []

    def loss_fn(params, data, power, *, weight, names, activation):
        traced.append(names)
        assert data["kind"] == "train" and names == ("x", "y")
        assert data["x"].shape == weight.shape == (BATCH // NUM_WORKERS, *data["x"].shape[1:])[:1]
        hidden = activation(data["x"][:, None] * params["in"][:1])
        noise = jax.random.normal(data["key"], ())
        return jnp.mean(weight[:, None] * hidden**power) * data["factor"] + noise

    params, x = plain_params(), batch()[0][:, 0]
    data = {"x": x, "kind": "train", "factor": 0.5, "key": jax.random.key(1), "none": None}
    rest = {"weight": x**2, "names": ("x", "y"), "activation": jnp.tanh}
    grad_fn = exact_grad_fn(data_mesh, loss_fn, static_argnums=2, static_argnames="names")
    loss, grads = grad_fn(params, data, 2, key=KEY, **rest)
    count = len(traced)
    grad_fn(params, data | {"factor": 0.25}, 2, key=KEY, **rest)
    assert len(traced) == count  # other numbers do not compile again

    def expected_loss(params):
        hidden = jnp.tanh(x[:, None] * params["in"][:1])
        noise = jax.random.normal(jax.random.key(1), ())
        return jnp.mean((x**2)[:, None] * hidden**2) * np.float32(0.5) + noise

    value, expected = jax.value_and_grad(expected_loss)(params)
    assert float(loss) == pytest.approx(float(value), rel=1e-5)
    close(grads, expected)


def test_workers_are_weighted_by_their_targets(data_mesh):
    """Padded examples do not count: the mean over all targets, whoever has them."""
    x, y = batch()
    mask = (np.arange(BATCH) % 8 < np.arange(BATCH) // 4).astype(np.float32)

    def loss_fn(params, x, y, mask):
        hidden = jnp.tanh(x @ params["in"] + params["bias"][None, :])
        squared = jnp.mean((hidden @ params["out"] - y) ** 2, axis=1)
        mean = jnp.sum(squared * mask) / jnp.maximum(jnp.sum(mask), 1)
        return mean, {"loss": mean}

    args = plain_params(), x, y, mask
    returns_aux = {"has_aux": True, "aux": "mean"}
    options = returns_aux | {"num_targets": lambda params, x, y, mask: mask.sum()}
    (loss, aux), grads = exact_grad_fn(data_mesh, loss_fn, **options)(*args, key=KEY)
    (expected_loss, _), expected = jax.value_and_grad(loss_fn, has_aux=True)(*args)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-5) == float(aux["loss"])
    close(grads, expected)
    (unweighted, _), _ = exact_grad_fn(data_mesh, loss_fn, **returns_aux)(*args, key=KEY)
    assert abs(float(unweighted) / float(loss) - 1) > 0.05


def test_leaves_that_are_not_floating_have_no_gradient(data_mesh):
    params = plain_params() | {"count": jnp.int32(3), "key": jax.random.key(0)}
    _, grads = exact_grad_fn(data_mesh, plain_loss)(params, *batch(), key=KEY)
    assert grads["count"].dtype == grads["key"].dtype == jax.dtypes.float0
    close(
        {name: grads[name] for name in plain_params()},
        jax.grad(plain_loss)(plain_params(), *batch()),
    )


def test_a_legacy_key_is_a_key(data_mesh):
    mesh = data_mesh(NUM_WORKERS)
    grad_fn = dq.value_and_grad(plain_loss, mesh=mesh, axis_name="data", method=STOCHASTIC)
    found = [
        grad_fn(plain_params(), *batch(), key=key)[1]
        for key in (jax.random.PRNGKey(3), jax.random.key(3), jax.random.PRNGKey(4))
    ]
    np.testing.assert_array_equal(found[0]["in"], found[1]["in"])
    assert np.any(np.asarray(found[0]["in"]) != np.asarray(found[2]["in"]))


class Noisy(nnx.Module):
    """Dropout, and statistics of the batch: state beside the parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, OUT, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jnp.tanh(self.norm(self.first(x)))))


def test_an_nnx_module_is_differentiated_and_gets_its_state_back(data_mesh):
    """Gradients as of nnx.value_and_grad; random streams go on; every worker has its own dropout,
    and statistics are those of all.
    """
    model = Noisy(nnx.Rngs(0))
    x = np.tile(batch()[0][: BATCH // NUM_WORKERS], (NUM_WORKERS, 1))  # the same for all workers

    def loss_fn(model, x):
        out = model(x)
        return jnp.mean(out**2), jax.lax.all_gather(out[0, 0], "data")

    grad_fn = exact_grad_fn(data_mesh, loss_fn, has_aux=True, aux="mean")
    with jax.numpy_dtype_promotion("standard"):
        (first, outputs), grads = grad_fn(model, x, key=KEY)
        (second, _), _ = grad_fn(model, x, key=KEY)
        _, expected = nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(
            Noisy(nnx.Rngs(0)), x
        )
    assert len(np.unique(np.asarray(outputs))) == NUM_WORKERS  # other units are dropped
    assert float(first) != float(second)  # and others at the next step
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert int(model.dropout.rngs.count[...]) == 2


def test_statistics_of_an_nnx_module_are_those_of_the_whole_batch(data_mesh):
    model, (x, _) = Noisy(nnx.Rngs(0)), batch()
    with jax.numpy_dtype_promotion("standard"):
        exact_grad_fn(data_mesh, lambda model, x: jnp.mean(model(x) ** 2))(model, x, key=KEY)
        expected = 0.01 * np.asarray(model.first(x)).mean(axis=0)  # a momentum of 0.99
    found = model.norm.mean[...]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert len(found.addressable_shards) == NUM_WORKERS


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ({"argnums": 4}, "argnums names position 4, but there are 3"),
        ({"static_argnums": -1}, "static_argnames names position -1"),
        ({"static_argnames": "table"}, r"names 'table', but the arguments are \['params', 'x', "),
        ({"static_argnames": "params"}, "Argument 'params' is given twice"),
    ),
)
def test_arguments_that_do_not_exist(data_mesh, arguments, words):
    with pytest.raises(ValueError, match=words):
        exact_grad_fn(data_mesh, plain_loss, **arguments)(plain_params(), *batch(), key=KEY)


def test_a_static_value_that_cannot_be_hashed(data_mesh):
    def loss_fn(params, x, y, *, table):
        return plain_loss(params, x, y)

    class Table:
        __hash__ = None

    with pytest.raises(ValueError, match=r"neither an array nor a number"):
        exact_grad_fn(data_mesh, loss_fn)(plain_params(), *batch(), key=KEY, table=Table())
