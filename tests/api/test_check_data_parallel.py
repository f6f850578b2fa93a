"""The first check: losses that workers may share, and those that they may not, by their cause."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq

ROWS, IN, OUT, NUM_WORKERS = 16, 12, 24, 4
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def defaults():
    """Losses are written as users write them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weights():
    return jax.random.normal(jax.random.key(1), (IN, OUT)) / 2


def inputs():
    return jax.random.normal(jax.random.key(2), (ROWS, IN)) * jnp.linspace(0.2, 2, ROWS)[:, None]


def mask():
    """The last worker has all its targets, the others fewer, the first one one."""
    return (jnp.arange(ROWS) % 4 <= jnp.arange(ROWS) // 4).astype(jnp.float32)


def per_row(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2, axis=-1)


def wrap(data_mesh, loss_fn, **arguments):
    return dq.data_parallel(loss_fn, mesh=data_mesh(NUM_WORKERS), axis_name="data", **arguments)


# ------------------------------------------------------------------------------- wrong losses


def pairs(w, x):
    scores = jnp.mean(x @ w, axis=-1)
    chosen, rejected = jnp.split(scores, 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


def grouped(size, *, cut=True):
    """Return a loss of scores beside the mean of their group.

    Rows that are fewer than a group are one, or an error.
    """

    def loss_fn(w, x):
        neighbors = min(size, len(x)) if cut else size
        scores = jnp.sum(jnp.tanh(x @ w), axis=-1).reshape(-1, neighbors)
        return jnp.mean((scores - scores.mean(axis=1, keepdims=True)) ** 2)

    return loss_fn


def first_rows(w, x):
    return jnp.mean(per_row(w, x[:4]))


def normalized(w, x):
    hidden = x @ w
    hidden = (hidden - hidden.mean(axis=0)) / jnp.sqrt(hidden.var(axis=0) + 1e-5)
    return jnp.mean(jnp.tanh(hidden + 0.5 * w.sum(axis=0)) ** 2)


def contrastive(w, x):
    logits = (x @ w) @ (x @ w[:, ::-1]).T / OUT
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)))


def class_weights(w, x, scales):
    """As many classes as rows."""
    picked = scales[(jnp.abs(x[:, 0]) * 7).astype(jnp.int32) % len(scales)]
    return jnp.mean(per_row(w, x) * picked)


def of_targets(w, x, mask):
    return jnp.sum(per_row(w, x) * mask) / jnp.maximum(jnp.sum(mask), 1)


def divided_by_targets(w, x, mask):
    return jnp.sum(per_row(w, x) * mask) / jnp.sum(mask)


def order(w, x):
    return jnp.mean(per_row(w, x) * jnp.linspace(0.5, 1, len(x)))


def dropped(w, x, key):
    return jnp.mean(per_row(w, x * jax.random.bernoulli(key, 0.5, x.shape)))


WRONG = {
    "rows in blocks": (pairs, inputs),
    "groups that are cut": (grouped(8), inputs),
    "a count of the whole batch": (first_rows, inputs),
    "statistics of the batch": (normalized, inputs),
    "rows that are compared with all others": (contrastive, inputs),
    "an array that is not of the batch": (class_weights, inputs, lambda: jnp.arange(ROWS) / 4.0),
    "a sum over rows": (lambda w, x: jnp.sum(per_row(w, x)), inputs),
    "a function of a mean": (lambda w, x: jnp.log(jnp.mean(per_row(w, x) ** 4)), inputs),
    "uneven targets": (of_targets, inputs, mask),
    "the order of rows": (order, inputs),
    "random numbers": (dropped, inputs, lambda: KEY),
    "numbers of the whole batch": (lambda w, x: jnp.mean(per_row(w, x.reshape(16, -1))), inputs),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cause", WRONG)
def test_a_wrong_loss_is_named(data_mesh, cause):
    loss_fn, *batch = WRONG[cause]
    with pytest.raises(ValueError, match=f"Likely cause: {cause}\\."):
        dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), *(make() for make in batch))


@pytest.mark.slow
@pytest.mark.parametrize("cause", sorted(set(WRONG) - {"groups that are cut"}))
def test_a_wrong_loss_is_named_with_any_weights_and_number_of_workers(data_mesh, cause):
    """Two workers have rows for a whole group each."""
    workers = 2
    loss_fn, _, *others = WRONG[cause]
    wrapped = dq.data_parallel(loss_fn, mesh=data_mesh(workers), axis_name="data")
    for seed in range(3):
        key = jax.random.key(10 + seed)
        w, x = jax.random.normal(key, (IN, OUT)) / 2, jnp.flip(inputs(), axis=1)
        with pytest.raises(ValueError, match=f"Likely cause: {cause}\\."):
            dq.check_data_parallel(wrapped, w, x, *(make() for make in others))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "loss_fn"),
    (
        ("a sum over rows", lambda w, x: jnp.mean(per_row(w, x)) * len(x) + jnp.sum(w**2)),
        ("a sum over rows", lambda w, x: jnp.sum(per_row(w, x) ** 2) / ROWS),
        ("a function of a mean", lambda w, x: jnp.mean(per_row(w, x)) ** 2),
        ("a function of a mean", lambda w, x: jnp.sqrt(jnp.mean(per_row(w, x)))),
    ),
)
def test_further_forms_of_wrong_losses(data_mesh, cause, loss_fn):
    with pytest.raises(ValueError, match=f"Likely cause: {cause}\\."):
        dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), inputs())


def test_groups_that_no_worker_has_a_whole_one_of_are_named(data_mesh):
    """The loss raises an error for the rows of a worker, and none for those of a group."""
    with pytest.raises(ValueError, match=r"Likely cause: groups that are cut\."):
        dq.check_data_parallel(wrap(data_mesh, grouped(8, cut=False)), weights(), inputs())


@pytest.mark.parametrize("function", [jnp.sqrt, jnp.log])
def test_a_function_of_a_mean_of_like_rows_is_named(data_mesh, function):
    """Losses of the workers are within some thousandths of each other."""

    def loss_fn(w, x):
        return function(jnp.mean((x @ w) ** 2))

    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (64, IN))
        with pytest.raises(ValueError, match="Likely cause: a function of a mean"):
            dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), x)


def test_in_batch_negatives_of_other_rows_are_named(data_mesh):
    def loss_fn(w, x, others):
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ w @ others.T)))

    others = jax.random.normal(jax.random.key(3), (ROWS, OUT))
    with pytest.raises(ValueError, match="Likely cause: rows that are compared with all others"):
        dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), inputs(), others)


def test_an_array_that_has_to_be_whole_is_named_where_its_part_raises_an_error(data_mesh):
    def loss_fn(w, x, labels, class_weights):
        picked = jax.nn.one_hot(labels, ROWS) * class_weights
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w[:, :ROWS]) * picked, axis=1))

    batch = inputs(), jnp.arange(ROWS), jnp.linspace(0.5, 2, ROWS)
    with pytest.raises(ValueError, match=r"error for the 4 rows.*With all of argument 3 on every"):
        dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), *batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_16_bits_is_no_difference(data_mesh, dtype):
    """Also in a part of the loss that is compiled apart. A difference of some percent is one."""

    def of_targets_in_16_bits(w, x, mask):
        rows = jax.jit(lambda w, x: per_row(w.astype(dtype), x.astype(dtype)))(w, x)
        return jnp.sum(rows.astype(jnp.float32) * mask) / jnp.sum(mask)

    batch = weights(), inputs(), mask()
    given = {"num_targets": lambda w, x, mask: mask.sum()}
    dq.check_data_parallel(wrap(data_mesh, of_targets_in_16_bits, **given), *batch)
    with pytest.raises(ValueError, match="Their gradients differ"):
        wrapped = wrap(data_mesh, of_targets_in_16_bits, **given)
        dq.check_data_parallel(wrapped, *batch, tolerance=1e-5)
    with pytest.raises(ValueError, match="uneven targets"):
        dq.check_data_parallel(wrap(data_mesh, of_targets_in_16_bits), *batch)


def test_a_worker_without_targets_is_named(data_mesh):
    none = mask() * (jnp.arange(ROWS) > 3)
    with pytest.raises(ValueError, match=r"a worker without targets.*worker 0 alone.*num_targets="):
        dq.check_data_parallel(wrap(data_mesh, divided_by_targets), weights(), inputs(), none)


def test_wrong_numbers_of_targets_are_named(data_mesh):
    wrapped = wrap(data_mesh, of_targets, num_targets=lambda w, x, mask: jnp.sum(mask) ** 2)
    with pytest.raises(ValueError, match=r"uneven targets.*shares are 0.100, 0.200, 0.300, 0.400"):
        dq.check_data_parallel(wrapped, weights(), inputs(), mask())


class Normalized(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, OUT, rngs=rngs)
        self.norm = nnx.BatchNorm(OUT, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def test_batch_normalization_of_flax_is_named(data_mesh):
    def loss_fn(model, x):
        return jnp.mean(jnp.tanh(model(x) + model.first.bias[...]) ** 2 * x[:, :1])

    with pytest.raises(ValueError, match="statistics of the batch"):
        dq.check_data_parallel(wrap(data_mesh, loss_fn), Normalized(nnx.Rngs(0)), inputs())


# ------------------------------------------------------------------------------- right losses


def with_sums(w, x, mask):
    loss = of_targets(w, x, mask)
    return loss, {"sum": jnp.sum(per_row(w, x) * mask), "loss": loss, "rows": per_row(w, x)}


def targets(w, x, mask):
    return jnp.sum(mask)


SUMS = {"sum": "sum", "loss": "mean", "rows": "rows"}


@pytest.mark.parametrize(
    ("loss_fn", "batch", "arguments"),
    (
        (lambda w, x: jnp.mean(per_row(w, x)), (inputs,), {}),
        (of_targets, (inputs, mask), {"num_targets": targets}),
        (pairs, (inputs,), {"split": "blocks:2"}),
        (grouped(4), (inputs,), {"split": "groups:4"}),
        (with_sums, (inputs, mask), {"num_targets": targets, "has_aux": True, "aux": SUMS}),
        (class_weights, (inputs, lambda: jnp.arange(ROWS) / 4.0), {"in_specs": {"scales": P()}}),
    ),
    ids=("mean", "targets", "blocks", "groups", "sums", "class weights"),
)
@pytest.mark.parametrize(
    "function", (dq.data_parallel, pytest.param(dq.value_and_grad, marks=pytest.mark.slow))
)
def test_a_right_loss_passes(data_mesh, function, loss_fn, batch, arguments):
    """It passes whatever the method, as nothing is compressed in the check."""
    how = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", "method": "dynamiq:3"}
    wrapped = function(loss_fn, **how, **arguments)
    assert dq.check_data_parallel(wrapped, weights(), *(make() for make in batch)) is None


def test_a_loss_that_gathers_what_it_compares_passes(data_mesh):
    """Statistics of all workers, by the name of their axis: alone, a worker is the only one."""

    def loss_fn(w, x):
        hidden = x @ w
        mean = jax.lax.pmean(hidden.mean(axis=0), "data")
        return jnp.mean(jnp.tanh(hidden - mean) ** 2)

    dq.check_data_parallel(wrap(data_mesh, loss_fn), weights(), inputs())


@pytest.mark.parametrize("is_set", (False, True))
def test_explicit_axes(is_set):
    """A loss that the types of explicit axes refuse is checked as it is trained."""
    mesh = jax.make_mesh((NUM_WORKERS,), ("data",), axis_types=(AxisType.Explicit,))

    def shuffled(w, x):
        return jnp.mean(per_row(w, x[jnp.arange(len(x))[::-1]]))

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        args = (
            jax.device_put(weights(), NamedSharding(mesh, P())),
            jax.device_put(inputs(), NamedSharding(mesh, P("data"))),
        )
        dq.check_data_parallel(dq.data_parallel(shuffled, mesh=mesh, axis_name="data"), *args)
        wrong = dq.data_parallel(lambda w, x: shuffled(w, x) * len(x), mesh=mesh, axis_name="data")
        with pytest.raises(ValueError, match="Likely cause: a sum over rows"):
            dq.check_data_parallel(wrong, *args)


def test_imaginary_parts_count(data_mesh):
    right = wrap(data_mesh, lambda w, x: jnp.mean(jnp.abs(x @ w)))
    dq.check_data_parallel(right, weights() * (1 + 2j), inputs())

    def wrong(w, x):
        hidden = x @ w
        return jnp.mean(hidden.real) + jnp.sum(hidden.imag)

    with pytest.raises(ValueError, match="a sum over rows"):
        dq.check_data_parallel(wrap(data_mesh, wrong), weights() + 0j, inputs())

    def with_sum(w, x):
        return jnp.mean(per_row(w, x)), 1j * jnp.sum(x)

    wrapped = wrap(data_mesh, with_sum, has_aux=True, aux="mean")
    with pytest.raises(ValueError, match="give the role 'sum'"):
        dq.check_data_parallel(wrapped, weights(), inputs())


class Dropping(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(IN, OUT, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.first(x))


def test_a_module_with_dropout_passes_and_is_not_changed(data_mesh):
    model = Dropping(nnx.Rngs(0))
    wrapped = wrap(data_mesh, lambda model, x: jnp.mean(jnp.tanh(model(x)) ** 2))
    dq.check_data_parallel(wrapped, model, inputs())
    assert int(model.dropout.rngs.count[...]) == 0 and not model.dropout.deterministic


# ---------------------------------------------------------------------------------------- aux


@pytest.mark.parametrize(
    ("roles", "words"),
    (
        (SUMS | {"sum": "mean"}, r"aux\['sum'\] with the role 'mean' is .* give the role 'sum'"),
        (SUMS | {"loss": "sum"}, r"aux\['loss'\] with the role 'sum' is .* give the role 'mean'"),
        (SUMS | {"loss": "same"}, r"aux\['loss'\] with the role 'same'.* give the role 'mean'"),
        (SUMS | {"rows": "mean"}, r"aux\['rows'\] .* shape \(4,\), .* give the role 'rows'"),
    ),
)
def test_a_wrong_role_is_named_with_the_right_one(data_mesh, roles, words):
    wrapped = wrap(data_mesh, with_sums, has_aux=True, aux=roles, num_targets=targets)
    with pytest.raises(ValueError, match=words):
        dq.check_data_parallel(wrapped, weights(), inputs(), mask())


def test_aux_that_is_no_mean_and_no_sum_is_an_error(data_mesh):
    def loss_fn(w, x):
        loss = jnp.mean(per_row(w, x))
        return loss, jnp.exp(8 * loss)

    wrapped = wrap(data_mesh, loss_fn, has_aux=True, aux="mean")
    with pytest.raises(ValueError, match="No role has the value of the whole batch"):
        dq.check_data_parallel(wrapped, weights(), inputs())


# ---------------------------------------------------------------------------------- arguments


def test_other_functions_and_values_are_refused(data_mesh):
    with pytest.raises(TypeError, match="is not a result of"):
        dq.check_data_parallel(pairs, weights(), inputs())
    wrapped = wrap(data_mesh, pairs)
    with pytest.raises(ValueError, match="tolerance=2 is out of range"):
        dq.check_data_parallel(wrapped, weights(), inputs(), tolerance=2)
    with pytest.raises(ValueError, match="loss of the whole batch is nan"):
        dq.check_data_parallel(wrapped, weights(), inputs() * np.float32(np.nan))


def test_the_tolerance_is_that_of_the_loss_and_of_gradients(data_mesh):
    """Uneven targets make a difference of some percent."""
    wrapped = wrap(data_mesh, of_targets)
    dq.check_data_parallel(wrapped, weights(), inputs(), mask(), tolerance=0.9)
    with pytest.raises(ValueError, match="uneven targets"):
        dq.check_data_parallel(wrapped, weights(), inputs(), mask(), tolerance=0.01)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_aux_may_hold_nan_and_infinity_and_its_other_values_are_compared(data_mesh, special):
    def of_workers(wrong):
        def loss_fn(w, x):
            aux = jnp.array([special, 2.0, 2.0 + wrong * jnp.max(x)])
            return jnp.mean(per_row(w, x)), jax.lax.stop_gradient(aux)

        return wrap(data_mesh, loss_fn, has_aux=True, aux="mean")

    dq.check_data_parallel(of_workers(0.0), weights(), inputs())
    with pytest.raises(ValueError, match="with the role 'mean'"):
        dq.check_data_parallel(of_workers(1.0), weights(), inputs())


@pytest.mark.parametrize(("scale", "passes"), [(1e-7, True), (1e-4, False)])
def test_a_loss_whose_terms_cancel_may_be_all_rounding(data_mesh, scale, passes):
    """As the first loss of GRPO, whose advantages sum to zero. Its gradient is that of the batch.

    The value of the loss is scaled apart from its gradient: it is another one for each worker.
    """

    def loss_fn(w, x):
        mean = jnp.mean(per_row(w, x))
        return mean - jax.lax.stop_gradient(mean) + scale * jax.lax.stop_gradient(jnp.max(x))

    wrapped = wrap(data_mesh, loss_fn)
    if passes:
        dq.check_data_parallel(wrapped, weights(), inputs())
    else:
        with pytest.raises(ValueError, match="for the whole batch"):
            dq.check_data_parallel(wrapped, weights(), inputs())
