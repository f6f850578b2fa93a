"""Specs of sums follow from the parameters that they update, where these have shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._inspection.step import inspect_text
from tests.compress.forms import PARAMS, X, Y, loss_fn, mean_loss, parts

METHOD = "bf16"
SPECS = {"w": P("fsdp"), "v": P(None, "fsdp"), "b": P()}
OPTIONS = {"method": dq.Compression(METHOD, exact_below=64)}
MAP = {"in_specs": (P(), P("data"), P("data")), "out_specs": P(), "axis_names": {"data"}}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def shardings(mesh):
    return {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}


@pytest.fixture
def args(mesh, shardings):
    rows = jax.NamedSharding(mesh, P("data"))
    own = jax.tree.map(jnp.copy, PARAMS)  # that may be donated
    return jax.device_put(own, shardings), *jax.device_put((X, Y), rows)


def update(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def update_inside(mesh, gradient=lambda *a: jax.grad(mean_loss)(*a)):
    """Return a step that updates inside of its map."""
    return jax.shard_map(lambda p, x, y: update(p, gradient(p, x, y)), mesh=mesh, **MAP)


def update_outside(mesh):
    gradient = jax.shard_map(lambda *a: jax.grad(mean_loss)(*a), mesh=mesh, **MAP)
    return lambda params, x, y: update(params, gradient(params, x, y))


def with_momentum(mesh):
    tx = optax.chain(optax.trace(0.9), optax.scale(-0.1))

    def local(params, x, y):
        grads = lax.pmean(jax.grad(loss_fn)(params, x, y), "data")
        updates, _ = tx.update(grads, tx.init(params))
        return optax.apply_updates(params, updates)

    return jax.shard_map(local, mesh=mesh, check_vma=False, **MAP)


def jitted_inside(mesh):
    """The shardings of the arguments are those that the inner function fixes."""
    placed = {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    rows = jax.NamedSharding(mesh, P("data"))
    inner = jax.jit(update_inside(mesh), in_shardings=(placed, rows, rows))
    return lambda *args: inner(*args)


def in_a_loop(mesh):
    """The gradients of two parts of the batch are added up first."""

    def gradient(params, x, y):
        def part(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, *batch)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(part, zeros, parts(x, y))[0]

    return update_inside(mesh, gradient)


def constrained(mesh):
    def gradient(params, x, y):
        grads = jax.grad(mean_loss)(params, x, y)
        return jax.tree.map(jax.lax.with_sharding_constraint, grads, SPECS)

    return update_inside(mesh, gradient)


STEPS = (update_inside, update_outside, with_momentum, jitted_inside, in_a_loop, constrained)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", STEPS)
def test_specs_of_sums_are_those_of_their_parameters(make, mesh, args):
    step = make(mesh)
    given = args if make is not constrained else (PARAMS, X, Y)
    compressed = dq.compress(step, "data", **OPTIONS)
    report = compressed.report(*given)
    halves = [each for each in report.compressed if each.sum.shape == (32, 32)]
    assert len(halves) == 2
    whole = dq.compress(step, "data", dq.Compression(METHOD, exact_below=64, specs=P())).report(
        *given
    )
    for half, full in zip(halves, whole.compressed, strict=True):
        assert half.bytes_after == pytest.approx(full.bytes_after / 2)
        assert half.bytes_before == pytest.approx(full.bytes_before / 2)
    expected = jax.jit(step)(*args)
    got = compressed(*given)
    change = [jax.tree.map(jnp.subtract, tree, PARAMS) for tree in (got, expected)]
    assert 1e-8 < dq.vnmse(*change) < 1e-4
    for name in "wv":
        np.testing.assert_allclose(got[name], expected[name], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_another_sharding_is_another_program(is_jitted, mesh, args):
    step = update_inside(mesh)
    compressed = dq.compress(jax.jit(step) if is_jitted else step, "data", **OPTIONS)
    split = compressed.report(*args).compressed
    whole = jax.device_put(PARAMS, jax.NamedSharding(mesh, P()))
    first, second = compressed(*args), compressed(whole, *args[1:])
    full = compressed.report(whole, *args[1:]).compressed
    assert [each.bytes_after for each in full] == [2 * each.bytes_after for each in split]
    sent = [dq.inspect(compressed, p, *args[1:]).bytes_compressed for p in (args[0], whole)]
    assert sent[1] == 2 * sent[0] > 0
    for name in "wv":
        np.testing.assert_allclose(first[name], second[name], rtol=1e-2, atol=1e-3)


# ---------------------------------------------------------------------------- steps that are jitted


# Settings of `jax.jit`, with one sharding for each argument in place of one for each leaf.
SETTINGS = {
    "whole": lambda weights, rows: {
        "in_shardings": (weights, rows, rows),
        "out_shardings": weights,
    },
    "arguments": lambda weights, rows: {"in_shardings": (weights, None, None)},
    "results": lambda weights, rows: {"out_shardings": weights},
    "nothing": lambda weights, rows: {},
    "donated": lambda weights, rows: {"in_shardings": (weights, rows, rows), "donate_argnums": 0},
}
# Arguments, from arrays with shardings and from plain ones.
ARGUMENTS = {
    "arrays": lambda placed, plain: placed,
    "some arrays": lambda placed, plain: (placed[0], *plain[1:]),
    "plain arrays": lambda placed, plain: plain,
    "shapes": lambda placed, plain: jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), placed
    ),
}
JITTED = [
    *((settings, "plain arrays") for settings in ("whole", "arguments", "results")),
    *((settings, "arrays") for settings in ("arguments", "donated", "nothing")),
    *(("nothing", "some arrays"), ("nothing", "shapes"), ("whole", "shapes")),
]


def jitted(name, step, mesh, shardings):
    return jax.jit(step, **SETTINGS[name](shardings, jax.NamedSharding(mesh, P("data"))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("settings", "given"), JITTED)
def test_all_that_a_jitted_step_does_knows_the_same_specs(settings, given, mesh, args, shardings):
    """Its report, its program as `lower` and `inspect` have it, and its result."""
    values = ARGUMENTS[given](args, (PARAMS, X, Y))
    step = jitted(settings, update_outside(mesh), mesh, shardings)
    compressed = dq.compress(step, "data", key=lambda *a: jax.random.key(0), **OPTIONS)
    report = compressed.report(*values)
    assert [each.sum.shape for each in report.compressed] == [(32, 32)] * 2
    sent = sum(each.bytes_after for each in report.compressed)
    assert sent == 2 * 2 * 32 * 32 / 2  # of two matrices, half of 16 bits, and again to gather
    assert dq.inspect(compressed, *values).bytes_compressed == sent
    for lowered in (compressed.lower(*values), compressed.trace(*values).lower()):
        assert inspect_text(lowered.compile().as_text()).bytes_compressed == sent
    if given == "shapes":
        return
    expected = jax.jit(update_outside(mesh))(PARAMS, X, Y)
    change = [jax.tree.map(jnp.subtract, tree, PARAMS) for tree in (compressed(*values), expected)]
    assert 1e-8 < dq.vnmse(*change) < 1e-4
    if settings == "donated":
        assert values[0]["w"].is_deleted()


@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("kind", ["unknown", "two"])
def test_specs_that_are_not_certain_are_one_error_of_report_and_call(
    kind, is_jitted, mesh, args, shardings
):
    def swapped(params, x, y):
        placed = {"w": shardings["v"], "v": shardings["w"], "b": shardings["b"]}
        return jax.lax.with_sharding_constraint(update_outside(mesh)(params, x, y), placed)

    step, given = (update_outside(mesh), (PARAMS, X, Y)) if kind == "unknown" else (swapped, args)
    compressed = dq.compress(jax.jit(step) if is_jitted else step, "data", **OPTIONS)
    for function in (compressed, compressed.report, compressed.trace, compressed.lower):
        with pytest.raises(ValueError, match="specs=None, but the compiler manages axis 'fsdp' of"):
            function(*given)
    (found,) = dq.inspect(compressed, *given).findings
    assert found.kind == "whole gradient"
    known = dq.compress(
        jax.jit(step) if is_jitted else step,
        "data",
        dq.Compression(METHOD, exact_below=64, specs=P()),
    )
    assert len(known.report(*given).compressed) == 2


def test_arguments_of_another_trace_have_no_shardings(mesh, args):
    with pytest.raises(ValueError, match="specs=None, but the compiler manages axis 'fsdp'"):
        jax.jit(dq.compress(update_inside(mesh), "data", **OPTIONS))(*args)


def test_a_step_with_shardings_keeps_them_in_the_jit_of_a_caller(mesh, args, shardings):
    whole = jitted("whole", update_outside(mesh), mesh, shardings)
    step = dq.compress(whole, "data", **OPTIONS)
    inside = jax.jit(lambda *args: step(*args))(PARAMS, X, Y)
    alone = step(*args)
    for name in "wv":
        np.testing.assert_array_equal(inside[name], alone[name])
        assert alone[name].sharding.is_equivalent_to(shardings[name], 2)


def test_a_constraint_may_leave_a_dimension_to_the_compiler(mesh):
    """In front of a sum that leaves a loop."""
    placed = jax.NamedSharding(mesh, P(P.UNCONSTRAINED, "fsdp"))

    @jax.jit
    def step(weights, batches):
        def turn(total, rows):
            gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(weights)
            return total + lax.with_sharding_constraint(gradient, placed), None

        return weights - lax.scan(turn, jnp.zeros_like(weights), batches)[0]

    weights = jax.device_put(PARAMS["w"], jax.NamedSharding(mesh, P(None, "fsdp")))
    batches = jax.device_put(jnp.stack([X, X + 1]), jax.NamedSharding(mesh, P(None, "data")))
    options = dq.Compression("exact", exact_below=64)
    compressed = dq.compress(step, "data", options)
    (found,) = compressed.report(weights, batches).compressed
    assert found.times == 1
    found, wanted = compressed(weights, batches), step(weights, batches)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
def test_explicit_axes_are_in_the_report(check_vma, scattered):
    """A part of the type of each sum, of which a device sends its own shard."""
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Explicit,) * 2)

    def local(weights, rows):
        own = lax.pcast(weights, "data", to="varying") if check_vma else weights
        gradient = jax.grad(lambda w: jnp.mean((rows @ w - 1) ** 2))(own)
        if scattered:
            return lax.psum_scatter(gradient, "data", scatter_dimension=1, tiled=True)
        return lax.pmean(gradient, "data")

    out = P(None, "data") if scattered else P()
    specs = {"in_specs": (P(), P("data")), "out_specs": out, "axis_names": {"data"}}
    step = jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs)
    weights = jax.device_put(PARAMS["w"], jax.NamedSharding(mesh, P("fsdp")))
    rows = jax.device_put(X, jax.NamedSharding(mesh, P("data")))
    compressed = dq.compress(step, "data", key=lambda *a: jax.random.key(0), **OPTIONS)
    with jax.set_mesh(mesh):
        (found,) = compressed.report(weights, rows).compressed
        sent = dq.inspect(compressed, weights, rows).bytes_compressed
    assert found.bytes_after == sent == (1 if scattered else 2) * 32 * 32 / 2


def sliced(mesh):
    """Return a step that trains the first half of a matrix alone."""
    gradient = jax.shard_map(
        jax.grad(lambda half, x: lax.pmean(jnp.mean((x @ half) ** 2), "data")),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )
    return lambda matrix, x: matrix.at[:32].set(matrix[:32] - gradient(matrix[:32], x))


def test_a_slice_lies_as_its_parameter_does_unless_it_cuts_what_is_split(mesh):
    matrix = jnp.concatenate([PARAMS["w"], PARAMS["v"]])
    step = dq.compress(sliced(mesh), "data", **OPTIONS)

    def report(spec):
        return step.report(jax.device_put(matrix, jax.NamedSharding(mesh, spec)), X)

    (whole,), (half,) = report(P()).compressed, report(P(None, "fsdp")).compressed
    assert half.bytes_after == pytest.approx(whole.bytes_after / 2)
    with pytest.raises(ValueError, match="specs=None, but the compiler manages axis 'fsdp' of"):
        report(P("fsdp"))


def test_gradients_that_are_results_lie_as_the_parameters_of_their_shape(args):
    """No update shows their specs: those of the parameters of the same paths are taken."""
    params, *rows = args
    step = dq.compress(jax.jit(jax.value_and_grad(loss_fn)), "data", **OPTIONS)
    found = [each.bytes_after for each in step.report(params, *rows).compressed]
    assert found == [2 * 32 * 32 / 2] * 2  # of shards of bf16

    def of_layers(layers, *rows):
        return loss_fn({name: layer["kernel"] for name, layer in layers.items()}, *rows)

    layers = {name: {"kernel": leaf} for name, leaf in params.items()}
    step_of_layers = dq.compress(jax.jit(jax.grad(of_layers)), "data", **OPTIONS)
    found_of_layers = step_of_layers.report(layers, *rows).compressed
    assert [each.bytes_after for each in found_of_layers] == found
    loss, gradients = step(params, *rows)
    exact_loss, exact = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    assert float(loss) == pytest.approx(float(exact_loss), rel=1e-6)
    assert float(dq.vnmse(gradients, exact)) < 1e-4
