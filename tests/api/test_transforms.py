"""The two transformations that run a loss for every worker: `jax.vmap` and `jax.shard_map`.

Both give the value and the gradients of the loss on one device, and send the same bytes. The tests
of `data_parallel` and `value_and_grad` run the default; laws of both are here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.support.gradients import vnmse
from tests.support.workers import STOCHASTIC

KEY = jax.random.key(0)
ROWS, IN, OUT = 16, 32, 64
LAYERS = 2
SETTINGS = {
    "vmap": {"transform": "vmap"},
    "checked": {"transform": "shard_map", "check_vma": True},
    "unchecked": {"transform": "shard_map", "check_vma": False},
}
SLOW = pytest.mark.slow  # other tests of the API run with the default
TRANSFORMS = pytest.mark.parametrize(
    "transform", ("vmap", *(pytest.param(name, marks=SLOW) for name in ("checked", "unchecked")))
)
FORMS = pytest.mark.parametrize(
    "form", ("data_parallel", pytest.param("value_and_grad", marks=SLOW))
)
OPTIONS = dq.Options(exact_below=100)


def mesh_of(shape=(2, 4), names=("data", "fsdp"), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def weights():
    rng = np.random.default_rng(0)
    return {
        "layers": (rng.normal(size=(LAYERS, IN, IN)) / IN**0.5).astype(np.float32),
        "out": (rng.normal(size=(IN, OUT)) / IN**0.5).astype(np.float32),
    }


SPECS = {"layers": P(None, "fsdp"), "out": P(None, "fsdp")}


def rows():
    return np.random.default_rng(1).normal(size=(ROWS, IN)).astype(np.float32)


def loss_fn(params, x, kernel=jnp.tanh):
    """Layers under a scan, of which the backward pass computes each again."""

    def layer(x, w):
        return kernel(x @ w), None

    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def value_and_grads(form, loss, **arguments):
    """Return a function to the value and gradients, by either public function."""
    arguments = {"axis_name": "data", "method": STOCHASTIC, "options": OPTIONS} | arguments
    if form == "value_and_grad":
        return functools.partial(dq.value_and_grad(loss, **arguments), key=KEY)
    has_aux = arguments.get("has_aux", False)
    return jax.value_and_grad(dq.data_parallel(loss, **arguments), has_aux=has_aux)


def check(found, expected, least=1e-7, most=1e-4):
    """Check a loss, and gradients of which all are compressed."""
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for ours, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        assert least <= vnmse(ours, other) < most


@functools.cache
def on_one_device():
    return jax.value_and_grad(loss_fn)(weights(), rows())


# --------------------------------------------------------------------------------- laws of all


@FORMS
def test_all_give_the_same_gradients_and_send_the_bytes_of_the_report(form):
    """The noise is the same too, so that only the order of sums on one device differs."""
    mesh, results = mesh_of(), {}
    placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(weights(), placed)
    x = jax.device_put(rows(), NamedSharding(mesh, P("data")))
    report = dq.wire_report(
        params, "data", mesh=mesh, specs=SPECS, method=STOCHASTIC, options=OPTIONS
    )
    for transform, setting in SETTINGS.items():
        run = value_and_grads(form, loss_fn, mesh=mesh, specs=SPECS, **setting)
        program = jax.jit(run).lower(params, x).compile()
        results[transform] = program(params, x)
        sent = sent_by_axes(program.as_text(), mesh)
        scalars = sent[("data",)] - report.bytes_per_worker  # the loss, and words of the batch
        assert 0 < scalars <= 16, transform
        assert not sent.get(("data", "fsdp"))
        check(results[transform], on_one_device())
    for other in ("checked", "unchecked"):
        pairs = map(jax.tree.leaves, (results["vmap"], results[other]))
        for ours, theirs in zip(*pairs, strict=True):
            assert vnmse(ours, theirs) < 1e-9  # that of other noise is 1e-6 and more


@SLOW
@TRANSFORMS
@FORMS
def test_several_axes_of_workers_and_arrays_of_all_kinds(form, transform):
    """Rows over both axes in any order, or over one of them, and arrays that are whole."""
    mesh = mesh_of((2, 2, 2), ("slices", "chips", "fsdp"))
    y = np.random.default_rng(2).normal(size=(ROWS, 4, OUT)).astype(np.float32)

    def loss(params, x, y, scale, kind):
        assert kind == "mean" and x.shape == (ROWS // 4, IN) and y.shape == (ROWS // 2, 2, OUT)
        return loss_fn(params, x) * scale[0] + jnp.mean(params["out"] * jnp.mean(y, (0, 1))[None])

    def whole(params, x, y):
        return loss_fn(params, x) * 2 + jnp.mean(params["out"] * jnp.mean(y, (0, 1))[None])

    run = value_and_grads(
        form,
        loss,
        mesh=mesh,
        axis_name=("slices", "chips"),
        in_specs={"x": P(("chips", "slices")), "y": P("slices", "chips"), "scale": P()},
        static_argnames="kind",
        specs=SPECS,
        **SETTINGS[transform],
    )
    found = jax.jit(lambda *args: run(*args, kind="mean"))(
        weights(), rows(), y, np.full(3, 2, np.float32)
    )
    check(found, jax.value_and_grad(whole)(weights(), rows(), y))


@TRANSFORMS
@FORMS
def test_targets_aux_and_leaves_that_are_not_floating(form, transform, data_mesh):
    mask = (np.arange(ROWS) < 7).astype(np.float32)

    def loss(params, x, mask):
        errors = jnp.mean((x @ params["out"]) ** 2, axis=1) * params["power"]
        mean = jnp.sum(errors * mask) / jnp.maximum(1, jnp.sum(mask))
        return mean, {"double": 2 * mean, "seven": jnp.float32(7)}

    run = value_and_grads(
        form,
        loss,
        mesh=data_mesh(4),
        has_aux=True,
        aux={"double": "mean", "seven": "same"},
        num_targets=lambda params, x, mask: mask.sum(),
        **SETTINGS[transform],
    )
    params = {"out": weights()["out"], "power": np.float32(3)}
    (value, aux), grads = jax.jit(run)(params, rows(), mask)
    (expected, _), of_one = jax.value_and_grad(loss, has_aux=True)(params, rows(), mask)
    np.testing.assert_allclose([value, aux["double"] / 2], expected, rtol=1e-5)
    assert float(aux["seven"]) == 7
    assert 1e-7 < vnmse(grads["out"], of_one["out"]) < 1e-4
    np.testing.assert_allclose(grads["power"], of_one["power"], rtol=1e-5)


class Noisy(nnx.Module):
    """Dropout, whose random stream a call goes on with."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, OUT, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.first(x))


@TRANSFORMS
@FORMS
def test_each_worker_has_dropout_of_its_own_and_modules_get_their_state(form, transform, data_mesh):
    """The same rows on all workers: the gradients of units show which workers kept them."""

    def loss(model, x):
        return jnp.mean(model(x))

    model, x = Noisy(nnx.Rngs(0)), np.ones((4, IN), np.float32)
    arguments = {"mesh": data_mesh(4), "axis_name": "data", "method": "exact"}
    if form == "value_and_grad":
        run = functools.partial(
            dq.value_and_grad(loss, **arguments, **SETTINGS[transform]), key=KEY
        )
    else:
        run = nnx.value_and_grad(dq.data_parallel(loss, **arguments, **SETTINGS[transform]))
    _, grads = run(model, x)
    kept = np.asarray(grads["first"]["bias"].get_value()) * 4 * OUT / 2  # workers that kept a unit
    assert set(np.unique(kept.round(4))) >= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert int(model.dropout.rngs.count[...]) == 1


@TRANSFORMS
@FORMS
def test_explicit_axes(form, transform):
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        params = {n: jax.device_put(v, NamedSharding(mesh, SPECS[n])) for n, v in weights().items()}
        x = jax.device_put(rows(), NamedSharding(mesh, P("data")))
        run = value_and_grads(form, loss_fn, mesh=mesh, **SETTINGS[transform])
        loss, grads = jax.jit(run)(params, x)
        assert jax.typeof(grads["out"]).sharding.spec == SPECS["out"]
    check((loss, grads), on_one_device())


@SLOW
@pytest.mark.parametrize("transform", ("checked", "unchecked"))
@FORMS
def test_collectives_of_the_loss_are_differentiated(form, transform, data_mesh):
    """Of a loss that is a mean over the workers already, and of one that multiplies by such."""

    def summed(params, x):
        mean = lax.pmean(jnp.mean(x @ params["out"]), "data")
        return lax.pmean(loss_fn(params, x), "data") + mean * loss_fn(params, x)

    def whole(params, x):
        return loss_fn(params, x) * (1 + jnp.mean(x @ params["out"]))

    run = value_and_grads(form, summed, mesh=data_mesh(4), **SETTINGS[transform])
    check(jax.jit(run)(weights(), rows()), jax.value_and_grad(whole)(weights(), rows()))


class Recurrent(linen.Module):
    """An RNN of flax, whose cell begins with zeros."""

    @linen.compact
    def __call__(self, x):
        return linen.RNN(linen.GRUCell(OUT))(x)


def gated(w, x):
    """An LSTM as keras has it: two states that begin with zeros, and outputs of each turn."""

    def cell(states, row):
        h, c = states
        i, f, g, o = jnp.split(row @ w + h @ jnp.tile(w, (2, 1)), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], OUT // 4))
    return lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))[1]


def running_sum(w, x):
    add = lambda total, row: (total + row @ w, total[..., :1])  # noqa: E731
    return jnp.concatenate(
        [each.ravel() for each in lax.scan(add, jnp.zeros((x.shape[0], OUT)), x.swapaxes(0, 1))]
    )


def counted(w, x):
    """A loop of a number of turns."""
    turn = lambda i, h: jnp.tanh(h + x[:, i] @ w)  # noqa: E731
    return lax.fori_loop(0, x.shape[1], turn, jnp.zeros((x.shape[0], OUT)))


def until(w, x):
    """A loop without an end that is known, of which no gradient is taken; its result has one."""
    turn = lambda state: (state[0] + 1, 0.5 * state[1] + lax.stop_gradient(x[:, 0] @ w))  # noqa: E731
    _, h = lax.while_loop(lambda state: state[0] < 3, turn, (0, jnp.zeros((x.shape[0], OUT))))
    return h * (x[:, 1] @ w)


def branches(w, x):
    """Branches of which one is a constant, by a number of the batch and by one of no array."""
    h = x[:, 0] @ w
    h = lax.cond(jnp.max(x) > -1, lambda: jnp.ones(h.shape), lambda: h) * h
    return h + lax.cond(jnp.sum(w) > -1e9, lambda: h, lambda: jnp.zeros(h.shape))


FROM_CONSTANTS = {
    each.__name__: each for each in (gated, running_sum, counted, until, branches)
} | {"recurrent": lambda params, x: Recurrent().apply(params, x)}


@pytest.mark.parametrize(
    "setting",
    ({}, *(pytest.param(setting, marks=SLOW) for setting in SETTINGS.values())),
    ids=("default", *SETTINGS),
)
@pytest.mark.parametrize("name", FROM_CONSTANTS)
@FORMS
def test_loops_and_branches_that_begin_with_constants(form, name, setting, data_mesh):
    """Under `check_vma=True`, JAX refuses them in any `jax.shard_map`."""
    x = jnp.asarray(rows().reshape(ROWS, 4, IN // 4))
    w = np.random.default_rng(3).normal(size=(IN // 4, OUT)).astype(np.float32) / 4
    params = Recurrent().init(KEY, x) if name == "recurrent" else w
    loss = lambda params, x: jnp.mean(FROM_CONSTANTS[name](params, x) ** 2)  # noqa: E731
    run = value_and_grads(form, loss, mesh=data_mesh(4), method="exact", **setting)
    if setting.get("check_vma"):
        with pytest.raises(TypeError, match="manual axis types do not match"):
            run(params, x)
        return
    expected = jax.value_and_grad(loss)(params, x)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[1]))
    check(jax.jit(run)(params, x), expected, least=0, most=1e-9)


@SLOW
@pytest.mark.parametrize("setting", ({}, *SETTINGS.values()), ids=("default", *SETTINGS))
@FORMS
def test_functions_whose_derivative_is_a_polynomial(form, setting, data_mesh):
    """Exact GELU, which JAX 0.12 cannot differentiate under `check_vma=True`."""
    gelu = functools.partial(jax.nn.gelu, approximate=False)
    loss = functools.partial(loss_fn, kernel=gelu)
    run = value_and_grads(form, loss, mesh=data_mesh(2), **setting)
    if setting.get("check_vma") and jax.__version_info__ >= (0, 12):
        with pytest.raises(ValueError, match="polynomial"):
            run(weights(), rows())
        return
    check(jax.jit(run)(weights(), rows()), jax.value_and_grad(loss)(weights(), rows()))


# ------------------------------------------------------------------------------- laws of jax.vmap


def kernel_over(mesh, spec):
    """`tanh` as a kernel with a `shard_map` of its own, and a constraint on the whole mesh."""

    def kernel(x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return kernel


@FORMS
def test_kernels_with_a_map_of_their_own_over_other_axes(form):
    """As flash attention of MaxText. Bytes over the other axes are those of the kernel alone."""
    mesh = mesh_of()
    loss = functools.partial(loss_fn, kernel=kernel_over(mesh, P("fsdp")))
    arguments = {"mesh": mesh, "specs": SPECS}
    placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(weights(), placed)
    x = jax.device_put(rows(), NamedSharding(mesh, P(("data", "fsdp"))))
    run = jax.jit(value_and_grads(form, loss, transform="vmap", **arguments))
    program = run.lower(params, x).compile()
    check(program(params, x), on_one_device())
    sent = sent_by_axes(program.as_text(), mesh)
    report = dq.wire_report(
        params, "data", mesh=mesh, specs=SPECS, method=STOCHASTIC, options=OPTIONS
    )
    assert 0 < sent[("data",)] - report.bytes_per_worker <= 16
    assert not sent.get(("data", "fsdp"))
    with pytest.raises(ValueError, match="Give transform='vmap'"):
        value_and_grads(form, loss, transform="shard_map", **arguments)(params, x)


def test_a_collective_in_a_kernel_is_over_all_workers():
    """Not over the one worker whose part the kernel has, which would do nothing."""
    mesh = mesh_of()

    def kernel(x):
        add = functools.partial(lax.psum, axis_name="data")
        return jax.shard_map(
            add, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
        )(x)

    def loss(w, x):
        return jnp.mean(kernel(x @ w) ** 2)

    run = value_and_grads(
        "data_parallel", loss, mesh=mesh, method="exact", specs=P(), transform="vmap"
    )

    def whole(w, x):
        return jnp.mean((x @ w).reshape(2, ROWS // 2, OUT).sum(axis=0) ** 2)

    args = weights()["out"], rows()
    check(jax.jit(run)(*args), jax.value_and_grad(whole)(*args), least=0, most=1e-10)


def test_a_loss_of_ones_own_broadcasts_its_parameters():
    """`dq.broadcast_to_replicas`: nothing is sent for frozen leaves, and the mean on request."""
    mesh = mesh_of()
    x = rows().reshape(2, ROWS // 2, IN)

    def mean_loss(out, frozen, x, **arguments):
        params = {"layers": frozen, "out": out}
        params = dq.broadcast_to_replicas(
            params,
            "data",
            mesh=mesh,
            method=STOCHASTIC,
            specs=SPECS,
            options=OPTIONS,
            **arguments,
        )
        assert params["out"].shape == (2, IN, OUT)
        losses = jax.vmap(loss_fn, spmd_axis_name="data")(params, x)
        return losses.sum() if arguments.get("mean") else losses.mean()

    params = weights()
    (expected, of_one), out = on_one_device(), params["out"]
    for arguments in ({}, {"mean": True, "key": KEY}):
        run = jax.jit(jax.value_and_grad(functools.partial(mean_loss, **arguments)))
        value, grad = run(out, params["layers"], x)
        np.testing.assert_allclose(value, expected * (2 if arguments else 1), rtol=1e-5)
        assert 1e-7 < vnmse(grad, of_one["out"]) < 1e-4
    sent = sent_by_axes(run.lower(out, params["layers"], x).compile().as_text(), mesh)
    report = dq.wire_report(
        {"out": out},
        "data",
        mesh=mesh,
        specs={"out": SPECS["out"]},
        method=STOCHASTIC,
        options=OPTIONS,
    )
    assert sent[("data",)] - report.bytes_per_worker in (0, 4)  # the sum of losses


def test_replicas_by_explicit_types():
    mesh = mesh_of(kind=AxisType.Explicit)
    with jax.set_mesh(mesh):
        w = jax.device_put(weights()["out"], NamedSharding(mesh, P("fsdp")))
        stacked = dq.broadcast_to_replicas(w, "data", method="exact")
        assert jax.typeof(stacked).sharding.spec == P("data", "fsdp", None)
        mean = functools.partial(dq.mean_of_replicas, axis_name="data", key=KEY, method="exact")
        back = jax.jit(mean)(stacked)
    np.testing.assert_array_equal(back, weights()["out"])


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"transform": "pmap"}, r"transform='pmap' is not supported. Give one of \('vmap', "),
        ({"transform": "vmap", "check_vma": False}, "check_vma=False is an argument of jax.shard"),
    ),
)
@FORMS
def test_arguments_that_are_refused(form, arguments, message):
    with pytest.raises(ValueError, match=message):
        value_and_grads(form, loss_fn, mesh=mesh_of(), **arguments)


@FORMS
def test_a_loss_that_names_the_axis_of_the_workers_is_told_what_to_change(form):
    mesh = mesh_of()
    both = P(("data", "fsdp"))
    for loss, message in (
        (lambda w, x: lax.pmean(jnp.mean(x @ w), "data"), "Give transform='shard_map'"),
        (lambda w, x: dq.pmean(jnp.mean(x @ w), "data", key=KEY), "Give transform='shard_map'"),
        (lambda w, x: jnp.mean(kernel_over(mesh, both)(x @ w)), r"as in P\('fsdp'\) for P\("),
    ):
        run = value_and_grads(form, loss, mesh=mesh, specs=P(), transform="vmap")
        with pytest.raises(ValueError, match=message):
            run(weights()["out"], rows())


def test_the_mesh_of_replicas_has_their_axis():
    with pytest.raises(ValueError, match="axis_name='rows' is not an axis of the mesh"):
        dq.broadcast_to_replicas(weights(), "rows", mesh=mesh_of())
    with pytest.raises(ValueError, match=r"carries state .* which dq.broadcast_to_replicas"):
        dq.broadcast_to_replicas(weights(), "data", mesh=mesh_of(), method="ef+topk_chunked:2")
