"""Losses as users write them: what they return, their defaults, where they are called."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

NUM_WORKERS, ROWS, IN, OUT = 4, 16, 32, 64
EXACT = 1e-5  # relative, of float32
KEY = jax.random.key(0)
FORMS = ("data_parallel", "value_and_grad")


@pytest.fixture(autouse=True)
def defaults():
    """Losses are written as users write them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weights():
    return jax.random.normal(jax.random.key(1), (IN, OUT))


def inputs():
    return jax.random.normal(jax.random.key(2), (ROWS, IN))


def mean(w, x):
    return jnp.mean((x @ w) ** 2)


def differentiated(form, loss_fn, mesh, **options):
    """`jax.value_and_grad` of the loss on all rows, by one of the two functions."""
    how = {"mesh": mesh, "axis_name": "data", "method": "exact"} | options
    if form == "data_parallel":
        has_aux = options.get("has_aux", False)
        return jax.jit(jax.value_and_grad(dq.data_parallel(loss_fn, **how), has_aux=has_aux))
    return functools.partial(dq.value_and_grad(loss_fn, **how), key=KEY)


# ------------------------------------------------------------------------------------- results

WRONG = {
    "a tuple": (lambda w, x: (mean(w, x), x), {}, r"a scalar is needed.*has_aux=True, and aux="),
    "rows": (lambda w, x: jnp.mean(x @ w, axis=1), {}, r"of shape \(4,\), and a scalar is needed"),
    "no aux": (mean, {"has_aux": True}, r"has_aux=True, but the loss returns .*leave out has_aux"),
    "three results": (
        lambda w, x: (mean(w, x), x, x),
        {"has_aux": True},
        r"has_aux=True, but the loss returns .*leave out has_aux",
    ),
    "targets by row": (
        mean,
        {"num_targets": lambda w, x: x[:, 0]},
        r"num_targets returns an array of shape \(4,\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_a_result_that_is_no_scalar_is_refused(data_mesh, form, case):
    loss_fn, options, words = WRONG[case]
    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS), **options)
    with pytest.raises(ValueError, match=words):
        step(weights(), inputs())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_means_of_16_bits_do_not_overflow(data_mesh, form, dtype):
    """The sum of the workers would be infinite in float16."""
    large = jnp.asarray(30_000, dtype)

    def loss_fn(w, x):
        return large + 0 * mean(w, x).astype(dtype), large

    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS), has_aux=True, aux="mean")
    (loss, aux), _ = step(weights(), inputs())
    assert loss == aux == large
    assert loss.dtype == aux.dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_without_targets_has_no_loss_and_no_gradient(data_mesh, form):
    def loss_fn(w, x, mask):
        return jnp.sum(jnp.mean((x @ w) ** 2, axis=1) * mask) / jnp.maximum(mask.sum(), 1)

    options = {"num_targets": lambda w, x, mask: mask.sum()}
    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS), **options)
    loss, gradient = step(weights(), inputs(), jnp.zeros(ROWS))
    assert loss == 0
    assert not np.any(gradient)
    assert step(weights(), inputs(), jnp.ones(ROWS))[0] > 0


def test_a_gradient_of_a_gradient_is_refused_with_the_way_to_one(data_mesh):
    loss_fn = dq.data_parallel(mean, mesh=data_mesh(NUM_WORKERS), axis_name="data")
    with pytest.raises(ValueError, match=r"inner one of the plain loss, inside the loss"):
        jax.grad(lambda w: jnp.sum(jax.grad(loss_fn)(w, inputs()) ** 2))(weights())


def mean_over_targets(w, x, mask):
    """Without a guard against 0/0, whose derivative is not finite either."""
    return jnp.sum(jnp.mean((x @ w) ** 2, axis=1) * mask) / mask.sum()


OVER_TARGETS = {"num_targets": lambda w, x, mask: mask.sum()}
TRANSFORMS = pytest.mark.parametrize("transform", ("vmap", "shard_map"))


@TRANSFORMS
@pytest.mark.parametrize("form", FORMS)
def test_workers_without_targets_take_no_part_whatever_their_loss_is(data_mesh, form, transform):
    """It is 0/0 on two workers of four, in a mean of aux too."""
    mask = jnp.zeros(ROWS).at[jnp.array([5, 12, 13, 14])].set(1.0)

    def loss_fn(w, x, mask):
        loss = mean_over_targets(w, x, mask)
        return loss, {"mean": 2 * loss, "count": mask.sum()}

    options = {"has_aux": True, "aux": {"mean": "mean", "count": "sum"}, "transform": transform}
    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS), **OVER_TARGETS, **options)
    (loss, aux), gradient = step(weights(), inputs(), mask)
    expected = jax.value_and_grad(mean_over_targets)(weights(), inputs(), mask)
    np.testing.assert_allclose(loss, expected[0], rtol=EXACT)
    np.testing.assert_allclose(aux["mean"], 2 * expected[0], rtol=EXACT)
    assert aux["count"] == 4
    np.testing.assert_allclose(gradient, expected[1], rtol=EXACT, atol=EXACT)


@pytest.mark.sampled(3)
@TRANSFORMS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("targets", ("all", "none"))
def test_nan_of_workers_that_take_part_surfaces(data_mesh, form, transform, targets):
    """So does 0/0 if no worker has targets, as it does on one device."""
    mask = jnp.full(ROWS, 1.0 if targets == "all" else 0.0)
    x = inputs().at[0].set(jnp.nan) if targets == "all" else inputs()
    how = {**OVER_TARGETS, "transform": transform}
    step = differentiated(form, mean_over_targets, data_mesh(NUM_WORKERS), **how)
    loss, gradient = step(weights(), x, mask)
    assert np.isnan(loss)
    assert np.all(np.isnan(gradient))


def test_the_check_ignores_workers_without_targets(data_mesh):
    how = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", **OVER_TARGETS}
    mask = jnp.zeros(ROWS).at[5:].set(1.0)
    dq.check_data_parallel(dq.data_parallel(mean_over_targets, **how), weights(), inputs(), mask)


@pytest.mark.parametrize("form", FORMS)
def test_complex_parameters_are_trained(data_mesh, form):
    params = {"c": weights() * (1 + 2j), "w": weights()}

    def loss_fn(params, x):
        return jnp.mean(jnp.abs(x @ params["c"]) ** 2) + mean(params["w"], x)

    _, gradient = differentiated(form, loss_fn, data_mesh(NUM_WORKERS))(params, inputs())
    expected = jax.grad(loss_fn)(params, inputs())
    for name, leaf in expected.items():
        assert gradient[name].dtype == leaf.dtype
        np.testing.assert_allclose(gradient[name], leaf, rtol=EXACT, atol=EXACT)


# ------------------------------------------------------------------------------------ defaults


@pytest.mark.parametrize("form", FORMS)
def test_defaults_of_a_loss_are_constants(data_mesh, form):
    """They are not traced and not split, and `num_targets` does not get them."""
    classes = jnp.arange(ROWS, dtype=jnp.float32)  # as long as the batch

    def loss_fn(w, x, train=True, layers=2, classes=classes):
        loss = mean(w, x) if train else jnp.mean(x @ w)
        return sum(loss for _ in range(layers)) + classes.sum()

    options = {"num_targets": lambda w, x: len(x)}
    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS), **options)
    expected, gradient = jax.value_and_grad(loss_fn)(weights(), inputs())
    found = step(weights(), inputs())
    np.testing.assert_allclose(found[0], expected, rtol=EXACT)
    np.testing.assert_allclose(found[1], gradient, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_named_argument_behind_one_that_is_left_out(data_mesh, form):
    def loss_fn(w, x, mask=None, y=None):
        assert mask is None
        return jnp.mean((x @ w) ** 2) + jnp.mean(y)

    step = differentiated(form, loss_fn, data_mesh(NUM_WORKERS))
    found, _ = step(weights(), inputs(), y=inputs())
    np.testing.assert_allclose(found, loss_fn(weights(), inputs(), y=inputs()), rtol=EXACT)


def test_an_argument_that_cannot_be_hashed_is_named(data_mesh):
    wrapped = dq.data_parallel(
        lambda w, x, setting: mean(w, x), mesh=data_mesh(NUM_WORKERS), axis_name="data"
    )
    wrapped(weights(), inputs(), type("Hashable", (), {})())
    with pytest.raises(ValueError, match=r"argument 2 is <.*neither an array.*frozen dataclass"):
        wrapped(weights(), inputs(), type("Other", (), {"__hash__": None})())


@pytest.mark.parametrize("argnums", [nnx.DiffState(0, nnx.Param), (0, "x"), 1.0])
def test_argnums_are_positions(data_mesh, argnums):
    for function in (dq.data_parallel, dq.value_and_grad):
        with pytest.raises(TypeError, match=r"is no position.*nnx.value_and_grad of dq.data_para"):
            function(mean, argnums, mesh=data_mesh(NUM_WORKERS), axis_name="data")


# --------------------------------------------------------------------------------------- state


class Sowing(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(weights())

    def __call__(self, x):
        y = x @ self.w
        self.sow(nnx.Intermediate, "y", y)
        return y


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_state_that_a_loss_adds_to_a_module_is_refused(data_mesh):
    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    wrapped = dq.data_parallel(loss_fn, mesh=data_mesh(NUM_WORKERS), axis_name="data")
    with pytest.raises(ValueError, match=r"adds state to a module .*'y'.*Return it as aux"):
        wrapped(Sowing(), inputs())


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_what_modules_sow_may_be_returned_as_aux(data_mesh):
    def loss_fn(model, x):
        loss = jnp.mean(model(x) ** 2)
        return loss, nnx.pop(model, nnx.Intermediate)

    how = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", "has_aux": True, "aux": "rows"}
    _, sown = dq.data_parallel(loss_fn, **how)(Sowing(), inputs())
    (rows,) = jax.tree.leaves(sown)
    np.testing.assert_allclose(rows, inputs() @ weights(), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_is_forgotten_with_its_wrapper(data_mesh, form):
    def run():
        def loss_fn(w, x):
            return mean(w, x)

        jax.block_until_ready(
            differentiated(form, loss_fn, data_mesh(NUM_WORKERS))(weights(), inputs())
        )
        return weakref.ref(loss_fn)

    known = run()
    gc.collect()
    assert known() is None


# --------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("transform", ["shard_map", "vmap"])
@pytest.mark.parametrize("form", FORMS)
def test_arrays_placed_on_a_mesh_of_explicit_axes(form, transform):
    """The default of `jax.make_mesh`, without `jax.set_mesh`."""
    mesh = jax.make_mesh((NUM_WORKERS,), ("data",), axis_types=(AxisType.Explicit,))
    w = jax.device_put(weights(), NamedSharding(mesh, P()))
    x = jax.device_put(inputs(), NamedSharding(mesh, P("data")))
    step = differentiated(form, mean, mesh, transform=transform)
    found = jax.jit(lambda w, x: step(w, x))(w, x)
    expected = jax.value_and_grad(mean)(weights(), inputs())
    np.testing.assert_allclose(found[0], expected[0], rtol=EXACT)
    np.testing.assert_allclose(found[1], expected[1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("given", [{"w": P("data")}, lambda tree: {"w": P(None, "data")}])
@pytest.mark.parametrize("form", FORMS)
def test_specs_that_split_parameters_over_the_workers_are_refused(data_mesh, form, given):
    step = differentiated(
        form, lambda params, x: mean(params["w"], x), data_mesh(NUM_WORKERS), specs=given
    )
    with pytest.raises(ValueError, match=r"specs gives .* for tree\['w'\], but 'data' is an axis"):
        step({"w": weights()}, inputs())


def on_two_axes():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def in_a_map(form, axis):
    mesh = on_two_axes()
    step = differentiated(form, mean, mesh)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P()), out_specs=P(), axis_names={axis}, check_vma=False
    )
    return jax.jit(mapped)(weights(), inputs())


@pytest.mark.parametrize("form", FORMS)
def test_a_call_inside_a_map_over_another_axis(form):
    found, expected = in_a_map(form, "model"), jax.value_and_grad(mean)(weights(), inputs())
    np.testing.assert_allclose(found[0], expected[0], rtol=EXACT)
    np.testing.assert_allclose(found[1], expected[1], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_inside_a_map_over_the_workers_is_refused(form):
    with pytest.raises(ValueError, match=r"inside a jax.shard_map over it.*dq.pmean after"):
        in_a_map(form, "data")


@pytest.mark.parametrize("form", FORMS)
def test_another_mesh_than_that_of_the_context_is_refused(data_mesh, form):
    step = differentiated(form, mean, data_mesh(NUM_WORKERS))
    with (
        jax.set_mesh(on_two_axes()),
        pytest.raises(ValueError, match=r"mesh has the axes \{'data': 4\}, .*'model': 2"),
    ):
        step(weights(), inputs())
