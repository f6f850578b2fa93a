"""Gradients of losses as people write them, in a global view: those of the same loss on one device.

`dq.compress(jax.jit(jax.value_and_grad(loss)), "data")` is the form for who has gradients in hand.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.speed.mesh_bytes import sent_by_axes
from tests.compress.global_forms import labels, normal

WORKERS, ROWS, IN, OUT = 4, 16, 32, 64
W, X = normal(IN, OUT, scale=0.2), normal(ROWS, IN)
SEQUENCES = normal(ROWS, 4, IN)
ROW_NUMBERS = jnp.arange(ROWS)
# Targets of four rows: two of the workers have none.
MASK = jnp.zeros(ROWS).at[jnp.array([5, 12, 13, 14])].set(1.0)
OPTIONS = dq.Compression("bf16", exact_below=64)


@pytest.fixture(autouse=True)
def promotions_of_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Loss(NamedTuple):
    """Loss of parameters and arrays, and the shapes of its sums that are compressed.

    Gradients of these shapes are rounded, or those of others.
    """

    loss: Callable[..., Any]
    params: Any = W
    arrays: tuple[Any, ...] = (X,)
    compressed: tuple[tuple[int, ...], ...] = ((IN, OUT),)
    rounded: tuple[tuple[int, ...], ...] | None = None
    has_aux: bool = False
    error: float = 1e-4


LOSSES: dict[str, Loss] = {}


def loss(*args: Any, **fields: Any) -> Callable[..., Any]:
    def registered(function: Callable[..., Any]) -> Callable[..., Any]:
        LOSSES[function.__name__] = Loss(function, *args, **fields)
        return function

    return registered


def squares(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def placed(mesh: Mesh, each: Loss) -> Any:
    """Parameters on all devices, and rows split over them."""
    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    params = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, float) else jax.device_put(leaf, whole), each.params
    )
    return params, *(
        jax.device_put(a, rows if a.shape[:1] == (ROWS,) else whole) for a in each.arrays
    )


def bits(leaf: Any) -> np.ndarray:
    """Values of an array that NumPy can compare, those of keys included."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jax.dtypes.float0:
        return np.zeros(leaf.shape)
    is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
    return np.asarray(leaf, np.complex128 if is_complex else np.float64)


def check(found: Any, expected: Any, shapes: Any, most: float = 1e-4) -> None:
    """Check that leaves of some shapes are rounded, and that no other one differs."""
    leaves, wanted = (jax.tree.leaves(jax.tree.map(jnp.asarray, t)) for t in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, other in zip(leaves, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (other.shape, other.dtype)
        ours, other = bits(ours), bits(other)
        if ours.shape in shapes and np.isrealobj(ours) and other.any():
            assert 1e-8 < np.sum((ours - other) ** 2) / np.sum(other**2) < most
        else:
            np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- masks, pairs, ranks, statistics


@loss(arrays=(X, MASK), has_aux=True)
def zero_targets_on_two_workers(w, x, mask):
    """Their own loss would be 0/0."""
    mean = jnp.sum(jnp.mean((x @ w) ** 2, axis=1) * mask) / mask.sum()
    return mean, {"double": 2 * mean, "targets": mask.sum()}


@loss(arrays=(X, jnp.linspace(0, 1, OUT), jnp.arange(1.0, ROWS + 1)))
def a_table_and_weights_of_rows(w, x, table, weights):
    return jnp.mean((x @ w) ** 2 * table * weights[:, None])


@loss()
def chosen_and_rejected_halves(w, x):
    chosen, rejected = jnp.split(jnp.mean(x @ w, axis=-1), 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


@loss()
def groups_of_neighbors(w, x):
    scores = jnp.mean(x @ w, axis=-1).reshape(-1, 4)
    return jnp.mean((scores - scores.mean(axis=1, keepdims=True)) ** 2)


@loss()
def ranks(w, x):
    scores = jnp.mean(jnp.tanh(x @ w), axis=-1)
    return jnp.mean((scores - jnp.argsort(jnp.argsort(scores)) / ROWS) ** 2)


@loss()
def deviation(w, x):
    return jnp.mean(jnp.std(x @ w, axis=0))


@loss()
def sums_of_earlier_rows(w, x):
    return jnp.mean(jnp.cumsum(jnp.tanh(x @ w), axis=0) ** 2)


# --------------------------------------------------------------------------- loops from constants


def gated(w, x):
    """Two states that begin with zeros, as those of an LSTM."""

    def cell(states, row):
        h, c = states
        i, f, g, o = jnp.split(row @ w + jnp.tile(h, 4) @ w[:1].T @ w[:1], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], OUT // 4))
    return lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))[1]


def running_sum(w, x):
    def add(total, row):
        return total + row @ w, total[..., :8]

    last, firsts = lax.scan(add, jnp.zeros((x.shape[0], OUT)), x.swapaxes(0, 1))
    return jnp.concatenate([last, *firsts], axis=-1)


def until(w, x):
    """A loop of which no gradient is taken; its result has one."""

    def turn(carry):
        return carry[0] + 1, 0.5 * carry[1] + lax.stop_gradient(x[:, 0] @ w)

    _, h = lax.while_loop(lambda c: c[0] < 3, turn, (0, jnp.zeros((x.shape[0], OUT))))
    return h * (x[:, 1] @ w)


def branches(w, x):
    """One of which is a constant, by a number of the batch and by one of no array."""
    h = x[:, 0] @ w
    h = lax.cond(jnp.max(x) > -1, lambda: jnp.ones(h.shape), lambda: h) * h
    return h + lax.cond(jnp.sum(w) > -1e9, lambda: h, lambda: jnp.zeros(h.shape))


for each in (gated, running_sum, until, branches):
    LOSSES[each.__name__] = Loss(
        lambda w, x, each=each: jnp.mean(each(w, x) ** 2), arrays=(SEQUENCES,)
    )


# ------------------------------------------------------------------------ dtypes of all arguments


for dtype in ("uint4", "float8_e4m3fn", "bool"):
    LOSSES[f"rows_of_{dtype}"] = Loss(
        lambda w, x: squares(w, x.astype(jnp.float32)), arrays=(jnp.abs(4 * X).astype(dtype),)
    )


@loss({"c": lax.complex(W, 2 * W), "w": W})
def complex_parameters(params, x):
    return jnp.mean(jnp.abs(x @ params["c"]) ** 2) + squares(params["w"], x)


@loss(W.astype(jnp.float8_e5m2), error=2e-3)
def parameters_of_eight_bits(w, x):
    return squares(w.astype(jnp.float32), x)


@loss({"codes": (15 * W).astype(jnp.int4), "scales": jnp.linspace(0.5, 1, OUT)}, rounded=((OUT,),))
def quantized_weights_with_scales(params, x):
    """The gradients of the codes have no elements. That of their product with scales is sent."""
    return squares(params["codes"].astype(jnp.float32) * params["scales"], x)


@loss({"w": W, "temperature": 0.5})
def a_python_number(params, x):
    return squares(params["w"], x * params["temperature"])


@loss({"w": W, "none": jnp.zeros((0, 3))}, has_aux=True)
def arrays_without_elements(params, x):
    return squares(params["w"], x) + jnp.sum(params["none"]), x[:, :0]


@loss(has_aux=True, arrays=(X.astype(jnp.float16),))
def numbers_near_the_limit_of_float16(w, x):
    """Their sum over the workers would be infinite."""
    large = jnp.float16(30_000)
    return large + squares(w, x).astype(jnp.float16), (large, squares(w, x))


@loss(arrays=(X, jax.random.split(jax.random.key(3), ROWS), jax.random.key(1)), has_aux=True)
def keys_of_rows_and_of_the_batch(w, x, of_rows, key):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, shape=(OUT,)))(of_rows)
    kept &= jax.random.bernoulli(key, 0.7, (ROWS, OUT))
    outputs = jnp.where(kept, x @ w, 0)
    aux = {"rows": outputs, "keys": jax.random.split(key), "none": None, "count": kept.sum()}
    return jnp.mean(outputs**2), aux


# ---------------------------------------------------------------------- parameters and operations


@loss({"embedding": W, "output": W}, compressed=((IN, OUT),) * 2)
def tied_parameters(params, x):
    return jnp.mean((x @ params["embedding"] @ params["output"].T) ** 2)


@jax.custom_vjp
def halved(w, x):
    return squares(w, x)


halved.defvjp(lambda w, x: jax.vjp(squares, w, x), lambda pull, g: pull(g / 2))
LOSSES["a_gradient_of_its_own"] = Loss(halved)


@jax.custom_vjp
def by_norm(x):
    return x


by_norm.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.minimum(1, 1e-3 / jnp.linalg.norm(g)),))


@loss()
def cotangents_clipped_by_the_norm_of_the_batch(w, x):
    return jnp.mean(by_norm(x @ w) ** 2)


@loss()
def a_penalty_on_the_gradient(w, x):
    return squares(w, x) + 0.1 * jnp.sum(jax.grad(squares)(w, x) ** 2)


@loss()
def a_norm_of_the_whole_batch(w, x):
    """The mean over rows by hand, in a map over the workers."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    mean = jax.shard_map(
        lambda h: lax.pmean(jnp.mean(h**2), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return jnp.mean(jnp.tanh(x @ w / jnp.sqrt(mean(x @ w))) ** 2 * ROW_NUMBERS[:, None])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_one_device(name, data_mesh):
    """Those of matrices are rounded. The loss and aux are those of the whole batch."""
    each = LOSSES[name]
    args = placed(data_mesh(WORKERS), each)
    function = jax.value_and_grad(each.loss, has_aux=each.has_aux, allow_int=True)
    grad_fn = dq.compress(jax.jit(function), "data", method=OPTIONS)
    report = grad_fn.report(*args)
    assert sorted(s.sum.shape for s in report.compressed) == sorted(each.compressed)
    expected = function(each.params, *each.arrays)
    check(grad_fn(*args), expected, each.rounded or each.compressed, each.error)


# ------------------------------------------------------------------------------- transformations


def clipped_by_example(w, x):
    of_rows = jax.vmap(lambda row: jax.grad(squares)(w, row[None]))(x)
    norms = jnp.sqrt(jnp.sum(of_rows**2, (1, 2), keepdims=True))
    return jnp.mean(of_rows / jnp.maximum(1, norms), 0)


def scaled(w, x):
    """A scale of the loss goes into the backward pass, and out of the gradients."""
    return jax.vjp(lambda w: squares(w, x), w)[1](jnp.float32(2**15))[0] / 2**15


def of_two_scales(w, x):
    """Divisions that differ in their number alone are done in front of one sum."""
    return jax.grad(squares)(w, x) / 2 + jax.grad(squares)(w, jnp.tanh(x)) / 8


def product_with_the_hessian(w, x):
    gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    return jax.grad(lambda w: jnp.vdot(gradient(w, x), W))(w)


def of_several_models(w, x):
    return jax.vmap(jax.grad(squares), (0, None))(jnp.stack([w, 2 * w, -w]), x)


def of_two_losses(w, x):
    return jax.jacrev(lambda w: jnp.stack([squares(w, x), jnp.mean(jnp.tanh(x @ w))]))(w)


def averaged_by_name(w, x):
    """A mean in a `jax.vmap` is over a dimension, which holds the rows."""

    def of_row(row):
        return jax.lax.pmean(jax.grad(squares)(w, row[None]), "rows")

    return jax.vmap(of_row, axis_name="rows", out_axes=None)(x)


# Functions of parameters and a batch, and the shape of their one compressed sum.
TRANSFORMED = {
    "of the batch, too": (jax.grad(squares, (0, 1)), (IN, OUT)),
    "a Jacobian": (of_two_losses, (2, IN, OUT)),
    "a named vmap": (averaged_by_name, (IN, OUT)),
    "several models": (of_several_models, (3, IN, OUT)),
    "a scale": (scaled, (IN, OUT)),
    "two scales": (of_two_scales, (IN, OUT)),
    "a second derivative": (product_with_the_hessian, (IN, OUT)),
    "examples": (clipped_by_example, (IN, OUT)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_of_gradients(name, data_mesh):
    function, shape = TRANSFORMED[name]
    args = placed(data_mesh(WORKERS), Loss(squares))
    grad_fn = dq.compress(jax.jit(function), "data", method=OPTIONS)
    assert [s.sum.shape for s in grad_fn.report(*args).compressed] == [shape]
    check(grad_fn(*args), function(W, X), (shape,))


# ------------------------------------------------------ states that a backward pass returns


def largest(x):
    return jnp.max(jnp.abs(x))


def pushed(state, x):
    """A history that begins with the magnitude of an array."""
    return jnp.roll(state, 1).at[0].set(largest(x))


def operation(forward, backward):
    """An operation of an array, with a state of which the next one is its cotangent."""

    @jax.custom_vjp
    def apply(x, state):
        return x

    apply.defvjp(lambda x, state: (x, forward(x, state)), backward)
    return apply


STATES = {
    "in the forward pass": operation(lambda x, s: pushed(s, x), lambda new, g: (g, new)),
    "in the backward pass": operation(lambda x, s: (x, s), lambda r, g: (g, pushed(r[1], r[0]))),
    "of cotangents": operation(lambda x, s: s, lambda s, g: (g, pushed(s, g))),
    "in a loop": operation(
        lambda x, s: s, lambda s, g: (g, lax.scan(lambda a, b: (b, a), largest(g), s)[1])
    ),
    "a mean": operation(lambda x, s: 0.9 * s + 0.1 * jnp.mean(jnp.abs(x)), lambda new, g: (g, new)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("in_a_scan", [False, True])
@pytest.mark.parametrize("name", STATES)
def test_states_are_those_of_one_device(name, in_a_scan, data_mesh):
    """Such as histories of maxima of FP8: over the whole batch, and in no sum."""

    def loss_fn(params, x):
        def layer(x, each):
            return jnp.tanh(STATES[name](x, each["state"]) @ each["w"]), None

        if in_a_scan:
            return jnp.mean(lax.scan(layer, x, params)[0] ** 2)
        return jnp.mean(layer(x, jax.tree.map(lambda leaf: leaf[0], params))[0] ** 2)

    params = {"w": normal(2, IN, IN, scale=0.2), "state": jnp.ones((2, 1024)) / 7}
    args = placed(data_mesh(WORKERS), Loss(loss_fn, params))
    grad_fn = dq.compress(jax.jit(jax.grad(loss_fn)), "data", method=OPTIONS)
    found, expected = grad_fn(*args), jax.grad(loss_fn)(params, X)
    assert {s.sum.shape[-2:] for s in grad_fn.report(*args).compressed} == {(IN, IN)}
    check(found, expected, (params["w"].shape,))


# ------------------------------------------------------------------------- how rows are known


def of_arrays(grad_fn, whole, rows):
    return lambda w, x: grad_fn()(*jax.device_put((w, x), (whole, rows)))


def of_one_by_name(grad_fn, whole, rows):
    return lambda w, x: grad_fn()(w, x=jax.device_put(x, rows))


def of_explicit_axes(grad_fn, whole, rows):
    """Without `jax.set_mesh`."""
    mesh = Mesh(whole.mesh.devices, whole.mesh.axis_names, axis_types=(AxisType.Explicit,))
    return of_arrays(grad_fn, *(NamedSharding(mesh, each.spec) for each in (whole, rows)))


def of_jit(grad_fn, whole, rows):
    return grad_fn(in_shardings=(whole, rows))


def of_constraints(grad_fn, whole, rows):
    return grad_fn(lambda w, x: squares(w, lax.with_sharding_constraint(x, rows)))


def of_a_batch_that_is_closed_over(grad_fn, whole, rows):
    x = jax.device_put(X, rows)
    return lambda w, _: grad_fn(lambda w: squares(w, x))(w)


def of_a_closure_in_a_loop(grad_fn, whole, rows):
    """Not jitted itself."""
    x = jax.device_put(X, rows)

    def of_turns(w):
        turn = jax.jit(jax.grad(lambda w: squares(w, x)))
        return lax.fori_loop(0, 1, lambda _, total: total + turn(w), jnp.zeros_like(w))

    return lambda w, _: dq.compress(of_turns, "data", method=OPTIONS)(w)


def of_specs(grad_fn, whole, rows):
    return grad_fn(in_specs=(whole, rows))


def of_specs_in_another_jit(grad_fn, whole, rows):
    return jax.jit(lambda *args: grad_fn(in_specs=(None, rows))(*args))


def of_specs_and_a_mesh(grad_fn, whole, rows):
    def run(w, x):
        with jax.set_mesh(whole.mesh):
            return grad_fn(in_specs=(P(), P("data")))(w, x)

    return run


@pytest.mark.parametrize(
    "known",
    (
        *(of_arrays, of_one_by_name, of_explicit_axes, of_jit, of_constraints),
        *(of_a_batch_that_is_closed_over, of_a_closure_in_a_loop),
        *(of_specs, of_specs_in_another_jit, of_specs_and_a_mesh),
    ),
)
def test_rows_are_known_from_any_placement(known, data_mesh):
    def grad_fn(function=squares, in_specs=None, **placements):
        jitted = jax.jit(jax.grad(function), **placements)
        return dq.compress(jitted, "data", method=OPTIONS, in_specs=in_specs)

    shardings = (NamedSharding(data_mesh(WORKERS), spec) for spec in (P(), P("data")))
    found = known(grad_fn, *shardings)(np.asarray(W), np.asarray(X))
    assert len(found.addressable_shards) == WORKERS
    check(found, jax.grad(squares)(W, X), (W.shape,))


@pytest.mark.parametrize("in_specs", [None, (P(), P("data"))])
def test_rows_that_no_mesh_splits_are_an_error_with_all_ways(in_specs):
    step = dq.compress(jax.jit(jax.grad(squares)), "data", in_specs=in_specs)
    says = r"(?s)known to be split over 'data'.*NamedSharding\(mesh.*in_specs= of NamedShardings"
    with pytest.raises(ValueError, match=says):
        step(W, X)


def test_an_error_names_the_loop_whose_turns_are_the_rows(data_mesh):
    """Micro-batches as a jitted step computes them on every device."""

    def of_micro_batches(w, x):
        return jax.lax.map(lambda x: jax.grad(squares)(w, x), x.reshape(WORKERS, -1, IN)).sum(0)

    step = dq.compress(jax.jit(of_micro_batches), "data")
    with pytest.raises(ValueError, match=r"turns of 'scan' of .*test_losses.py:.*_constraint"):
        step(*placed(data_mesh(WORKERS), Loss(squares)))


def test_gradients_alone_are_sent_in_the_shards_that_their_jit_names():
    """No parameter is updated, from which their specs could follow."""
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    whole, rows, shards = (NamedSharding(mesh, spec) for spec in (P(), P("data"), P(None, "fsdp")))
    sent = []
    for out in (whole, shards):
        jitted = jax.jit(
            jax.value_and_grad(squares), in_shardings=(shards, rows), out_shardings=(whole, out)
        )
        grad_fn = dq.compress(jitted, "data", method=OPTIONS)
        found = grad_fn(W, X)
        check(found, jax.value_and_grad(squares)(W, X), (W.shape,))
        assert found[1].sharding.spec == out.spec
        sent.append(dq.inspect(grad_fn, W, X).bytes_compressed)
    assert sent[0] == 2 * sent[1] > 0


@pytest.mark.parametrize(
    ("before", "after", "summed"),
    [
        *(("bfloat16", "float32", "float32"), ("float16", "float32", "float32")),
        *(("float32", "bfloat16", "float32"), ("bfloat16", "float16", "bfloat16")),
        ("float16", "bfloat16", "float16"),
    ],
)
def test_terms_are_summed_in_the_wider_dtype(before, after, summed, data_mesh):
    """A conversion is done in front of a sum if it keeps all numbers, those near the limits too."""

    def step(w, x):
        return jax.grad(squares)(w, x).astype(after)

    each = Loss(squares, W.astype(before), (X.astype(before),))
    report = dq.compress(jax.jit(step), "data", method=OPTIONS).report(
        *placed(data_mesh(WORKERS), each)
    )
    assert [one.sum.dtype for one in report.compressed] == [jnp.dtype(summed)]


def test_sums_that_are_alike_keep_the_settings_around_them(data_mesh):
    """Such as metadata for the compiler, which the first of them has not."""

    def two(w, x):
        gradients = []
        for name in ("first", "second"):
            with set_xla_metadata(of_step=name):
                gradients.append(jax.grad(squares)(w, x))
        return gradients

    args, step = placed(data_mesh(WORKERS), Loss(squares)), jax.jit(two)

    def products(step):
        """The contractions of the lowered step with each setting."""
        lines = [line for line in step.lower(*args).as_text().splitlines() if "dot_general" in line]
        return [
            sum(f'of_step = "{each}"' in line for line in lines) for each in ("first", "second")
        ]

    expected = products(step)
    assert all(expected)
    assert products(dq.compress(step, "data", method=OPTIONS)) == expected


TURNS = normal(4, ROWS, IN)  # rows of four turns of a loop


def turns_on(mesh: Mesh) -> Any:
    return jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(
        TURNS, NamedSharding(mesh, P(None, "data"))
    )


def test_numbers_that_print_alike_are_two(data_mesh):
    def step(w, rows):
        def turn(totals, x):
            one, other = (jax.grad(squares)(w, scale * x) for scale in (1, 2))
            factors = np.float32(0.000100006), np.float32(0.000100014)
            return tuple(
                t + f * g for t, f, g in zip(totals, factors, (one, other), strict=True)
            ), None

        return lax.scan(turn, (jnp.zeros_like(w),) * 2, rows)[0]

    args = turns_on(data_mesh(WORKERS))
    for expected, got in zip(
        jax.jit(step)(*args), dq.compress(jax.jit(step), "data", method="exact")(*args), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-9)


def test_small_integers_that_leave_a_loop_keep_their_dtype(data_mesh):
    def step(w, rows):
        def turn(w, x):
            return w - jax.grad(squares)(w, x), jnp.sum(x > 0, 0, dtype=jnp.int8)

        return lax.scan(turn, w, rows)

    args = turns_on(data_mesh(WORKERS))
    (_, expected), (_, got) = (f(*args) for f in (step, dq.compress(jax.jit(step), "data")))
    assert got.dtype == jnp.int8
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("by_hand", (False, True))
def test_statistics_that_join_gradients_of_biases_stay_exact(by_hand, data_mesh):
    """Both are small in a turn of a loop, and large as what all turns return."""
    mesh = data_mesh(WORKERS)

    def step(w, bias, rows):
        total = (lambda value: lax.psum(value, "data")) if by_hand else (lambda value: value)

        def turn(kept, x):
            g, of_bias = jax.grad(lambda w, b: jnp.mean((x @ w + b) ** 2), (0, 1))(w, bias)
            return kept + total(g), total(of_bias) + total(jnp.sum(jnp.hstack([x, x]), 0))

        return lax.scan(turn, jnp.zeros_like(w), rows)

    if by_hand:
        specs = P(), P(), P(None, "data")
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    w, rows = turns_on(mesh)
    bias = jax.device_put(jnp.ones(OUT), NamedSharding(mesh, P()))
    method = dq.Compression("bf16", exact_below=2 * OUT)
    compressed = dq.compress(jax.jit(step), "data", method=method)
    (g, statistics), (exact, expected) = compressed(w, bias, rows), jax.jit(step)(w, bias, rows)
    np.testing.assert_allclose(statistics, expected, rtol=1e-5, atol=1e-6)
    check((g,), (exact,), (W.shape,))


@pytest.mark.parametrize("check_vma", (False, True))
@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("in_a_loop", (False, True))
def test_rows_of_one_axis_beside_sums_by_hand_over_another(kind, check_vma, in_a_loop):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)

    def local(w, rows):
        own = lax.pcast(w, "model", to="varying") if check_vma else w
        factor = 1.0 + lax.axis_index("model").astype(jnp.float32)
        if in_a_loop:
            turn = lambda total, x: (total + factor * jax.grad(squares)(own, x), None)  # noqa: E731
            total = lax.scan(turn, jnp.zeros_like(own), rows)[0]
        else:
            total = factor * jax.grad(squares)(own, rows[0])
        return lax.psum(total, "model")

    with jax.set_mesh(mesh):
        step = jax.jit(
            jax.shard_map(
                local,
                in_specs=(P(), P("model")),
                out_specs=P(),
                axis_names={"model"},
                check_vma=check_vma,
            )
        )
        args = jax.device_put(W, P()), jax.device_put(TURNS, P("model", "data"))
        expected, got = step(*args), dq.compress(step, "data", method="exact")(*args)
    np.testing.assert_allclose(*map(jax.device_get, (got, expected)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("known_by", ["state", "constraint"])
def test_shards_over_the_axis_of_the_workers_get_their_part_of_a_sum(known_by, data_mesh):
    """Although the parameters are whole: half of the bytes of a sum that all have."""
    mesh = data_mesh(WORKERS)
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def step(w, momentum, x):
        gradient = jax.grad(squares)(w, x)
        if known_by == "constraint":
            gradient = lax.with_sharding_constraint(gradient, parts)
        momentum = 0.9 * momentum + gradient
        return w - 0.1 * momentum, momentum

    given = parts if known_by == "state" else None
    jitted = jax.jit(step, in_shardings=(whole, given, parts), out_shardings=(whole, given))
    compressed = dq.compress(jitted, "data", method=OPTIONS)
    args = W, jnp.zeros_like(W), X
    (weights, momentum), (others, expected) = compressed(*args), jitted(*args)
    check((weights - W, momentum), (others - W, expected), (W.shape,))
    (found,) = compressed.report(*args).compressed
    assert found.sum.operation == "psum_scatter"
    assert found.bytes_after == W.size * 2 * (WORKERS - 1) / WORKERS  # 16 bits


def test_a_constraint_on_the_gradient_of_each_layer_leaves_the_loop_with_its_sum(data_mesh):
    mesh = data_mesh(WORKERS)
    whole, parts = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    layers, x = normal(3, 32, 32, scale=0.2), normal(16, 32)

    @jax.custom_vjp
    def in_shards(w):
        return w

    def backward(_, gradient):
        return (lax.with_sharding_constraint(gradient, parts),)

    in_shards.defvjp(lambda w: (w, None), backward)

    def loss(layers, x):
        return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ in_shards(w)), None), x, layers)[0])

    jitted = jax.jit(jax.grad(loss), in_shardings=(whole, parts), out_shardings=whole)
    compressed = dq.compress(jitted, "data", method=OPTIONS)
    check(compressed(layers, x), jitted(layers, x), (layers.shape,))
    assert [each.sum.shape for each in compressed.report(layers, x).compressed] == [layers.shape]


@pytest.mark.parametrize("rows", [P(("hosts", "local")), P("hosts", "local")], ids=str)
def test_sums_are_compressed_between_hosts_alone(rows):
    """Rows over both axes, of one dimension or of two."""
    axes = ("hosts", "local")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(SEQUENCES, NamedSharding(mesh, rows))
    grad_fn = dq.compress(jax.jit(jax.grad(squares)), axes, method=OPTIONS)
    w = jax.device_put(W, NamedSharding(mesh, P()))
    gradient = grad_fn(w, x)
    check(gradient, jax.grad(squares)(W, SEQUENCES), (W.shape,))
    assert gradient.sharding.is_fully_replicated  # as its parameter is
    (found,) = grad_fn.report(w, x).compressed
    assert found.bytes_after == W.size * 2 / 2  # 16 bits, and half for each device of a host
    sent = sent_by_axes(grad_fn.lower(w, x).compile().as_text(), mesh)
    assert 0 <= sent[("hosts",)] - found.bytes_after <= 8


def test_rows_that_would_move_between_workers_are_an_error_with_their_spec():
    """Each device would send its activations to others, for gradients in fewer bits."""
    axes = ("hosts", "local")
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(X, NamedSharding(mesh, P(("local", "hosts"))))
    step = dq.compress(jax.jit(jax.grad(squares)), "hosts", method=OPTIONS)
    with pytest.raises(ValueError, match=r"'local' first: give 'hosts' .* \('local', 'hosts'\)"):
        step(W, x)
    alone = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), axes)  # one device of each host
    x = jax.device_put(X, NamedSharding(alone, P(("local", "hosts"))))
    assert len(step.report(W, x).compressed) == 1


def test_of_lost_rows_contractions_alone_are_in_the_report(data_mesh):
    """Not the equations that compute with them in the backward pass."""

    def loss(w, x):
        rows = (x @ w).T.reshape(-1)  # features come first
        return jnp.mean(jnp.tanh(rows) ** 2) + jnp.mean((x @ w) ** 2)

    step = dq.compress(jax.jit(jax.grad(loss)), "data", method=OPTIONS)
    report = step.report(*placed(data_mesh(WORKERS), Loss(loss)))
    assert [each.sum.shape for each in report.sums] == [W.shape, W.shape[::-1]]
    assert "'reshape'" in next(each.why_exact for each in report.sums if each.why_exact)


def test_lost_rows_of_a_table_and_a_bias_are_in_the_report(data_mesh):
    """`jnp.pad` loses the rows, which a scatter and a sum contract."""

    def loss(params, tokens):
        padded = jnp.pad(tokens, ((0, WORKERS), (0, 0)))
        return jnp.mean(jnp.tanh(params["table"][padded] + params["bias"]) ** 2)

    mesh, width = data_mesh(WORKERS), 1024
    params = {"table": normal(16, width), "bias": normal(1, 1, width)}
    tokens = jax.device_put(labels(16, 4, below=16), NamedSharding(mesh, P("data")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    step = dq.compress(jax.jit(jax.grad(loss)), "data", missing_ok=True)
    kept = {each.sum.shape: each.why_exact for each in step.report(params, tokens).sums}
    assert {(16, width), (width,)} <= {*kept}
    assert all("not followed through 'pad'" in why for why in kept.values())


def test_types_of_explicit_axes_have_rows_that_are_lost_otherwise():
    """Through `jnp.pad`, and of arrays that a step does not get as arguments."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = jax.device_put(W, P()), jax.device_put(normal(16, IN), P("data"))

        def padded(w, x):
            return squares(w, jnp.pad(x, ((0, WORKERS), (0, 0))))

        for step, args in ((jax.grad(padded), (w, x)), (jax.grad(lambda w: squares(w, x)), (w,))):
            compressed = dq.compress(jax.jit(step), "data", method="exact")
            np.testing.assert_allclose(
                *map(jax.device_get, (compressed(*args), jax.jit(step)(*args))),
                rtol=1e-5,
                atol=1e-7,
            )
            assert [e.sum.shape for e in compressed.report(*args).compressed] == [W.shape]


@pytest.mark.parametrize("types", [(AxisType.Auto, AxisType.Explicit), (AxisType.Auto,) * 2])
def test_the_mesh_that_is_set_has_the_workers(types, data_mesh):
    """Also where the batch is split over another one with an axis of that name, and where a further
    axis is explicit.
    """
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=types)
    batch = mesh if AxisType.Explicit in types else data_mesh(WORKERS)
    rows = jax.device_put((labels(16, below=8), normal(16, IN)), NamedSharding(batch, P("data")))

    def step(table, places, x):
        return jax.grad(lambda table: jnp.mean((x - jnp.tanh(table[places])) ** 2))(table)

    with jax.set_mesh(mesh):
        table = jax.device_put(normal(8, IN), P())
        compressed = dq.compress(jax.jit(step), "data", dq.Compression("exact", exact_below=1))
        found, expected = compressed(table, *rows), jax.jit(step)(table, *rows)
        np.testing.assert_allclose(*map(jax.device_get, (found, expected)), rtol=1e-5, atol=1e-8)
        assert [e.sum.shape for e in compressed.report(table, *rows).compressed] == [(8, IN)]


def test_a_batch_without_rows_is_that_of_the_jitted_step(data_mesh):
    x = jax.device_put(jnp.zeros((0, IN)), NamedSharding(data_mesh(WORKERS), P("data")))
    step = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))))
    compressed = dq.compress(step, "data", method="exact", missing_ok=True)
    np.testing.assert_array_equal(compressed(W, x), 0)


@pytest.mark.parametrize("name", ["mean", "changes"])
def test_replicas_are_the_rows_of_an_array(name, data_mesh):
    """A mean of parameters, or of their changes as in DiLoCo, is no gradient: `only` names it."""
    functions = {
        "mean": lambda w, replicas: jnp.mean(replicas, 0),
        "changes": lambda w, replicas: w + 0.7 * jnp.mean(replicas - w, 0),
    }
    stacked = normal(WORKERS, IN, OUT)
    rows = NamedSharding(data_mesh(WORKERS), P("data"))
    step = dq.compress(
        jax.jit(functions[name], in_shardings=(None, rows)),
        "data",
        method="bf16",
        only=lambda each: each.origin == "other",
    )
    check(step(W, stacked), functions[name](W, stacked), (W.shape,))


def test_replicas_of_parameters_have_one_gradient(data_mesh):
    rows = NamedSharding(data_mesh(WORKERS), P("data"))

    def loss_fn(w, x):
        replicas = jnp.broadcast_to(w, (WORKERS, *w.shape))
        own = x.reshape(WORKERS, -1, IN)
        return jnp.mean(jax.vmap(squares)(lax.with_sharding_constraint(replicas, rows), own))

    grad_fn = dq.compress(jax.jit(jax.grad(loss_fn)), "data", method=OPTIONS)
    args = placed(data_mesh(WORKERS), Loss(loss_fn))
    assert [each.sum.shape for each in grad_fn.report(*args).compressed] == [W.shape]
    check(grad_fn(*args), jax.grad(squares)(W, X), (W.shape,))
