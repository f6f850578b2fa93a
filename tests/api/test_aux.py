"""Aux of a loss: means, sums, rows and values that are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dynamiq_jax as dq

ROWS, IN, OUT, NUM_WORKERS = 16, 32, 48, 4
KEY = jax.random.key(0)
ROLES = {"loss": "mean", "xent_sum": "sum", "tokens": "sum", "scores": "rows", "rate": "same"}


def weights():
    return jax.random.normal(jax.random.key(1), (IN, OUT)) / 8


def batch():
    """The first worker has no target, the last one four."""
    x = jax.random.normal(jax.random.key(2), (ROWS, IN)) * jnp.linspace(0.1, 2, ROWS)[:, None]
    return x, jnp.arange(ROWS) % 4 < jnp.arange(ROWS) // 4


def loss_fn(w, x, mask):
    scores = jnp.mean((x @ w) ** 2, axis=-1)
    xent_sum, tokens = jnp.sum(scores * mask.astype(jnp.float32)), jnp.sum(mask)
    loss = xent_sum / jnp.maximum(tokens, 1).astype(jnp.float32)
    aux = {"loss": loss, "xent_sum": xent_sum, "tokens": tokens, "scores": scores, "rate": 0.1}
    return loss, aux


def num_targets(w, x, mask):
    return mask.sum()


def both(data_mesh, loss_fn, **arguments):
    how = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", "method": "exact", "has_aux": True}
    how |= arguments
    return (
        jax.value_and_grad(dq.data_parallel(loss_fn, **how), has_aux=True),
        lambda *args: dq.value_and_grad(loss_fn, **how)(*args, key=KEY),
    )


@pytest.mark.parametrize("jit", (False, True), ids=("eager", "jit"))
def test_aux_is_that_of_the_batch_with_uneven_targets(data_mesh, jit):
    """As in MaxText, whose loss in logs is a sum over another one."""
    (expected, expected_aux), expected_grads = jax.value_and_grad(loss_fn, has_aux=True)(
        weights(), *batch()
    )
    for run in both(data_mesh, loss_fn, aux=ROLES, num_targets=num_targets):
        (loss, aux), grads = (jax.jit(run) if jit else run)(weights(), *batch())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), aux, expected_aux)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(aux["xent_sum"] / float(aux["tokens"]), loss, rtol=1e-5)
        np.testing.assert_allclose(grads, expected_grads, rtol=1e-4, atol=1e-7)
        assert jax.tree.map(jnp.shape, aux) == jax.tree.map(jnp.shape, expected_aux)
        assert aux["tokens"].dtype == expected_aux["tokens"].dtype  # a sum of counts is one


def test_rows_of_blocks_are_in_the_order_of_the_batch(data_mesh):
    """So are those of pairs, of which there are half as many."""

    def of_pairs(w, x):
        scores = jnp.mean(x @ w, axis=-1)
        chosen, rejected = jnp.split(scores, 2)
        return jnp.mean((chosen - rejected) ** 2), (scores, chosen - rejected)

    expected, _ = jax.value_and_grad(of_pairs, has_aux=True)(weights(), batch()[0])
    for run in both(data_mesh, of_pairs, aux="rows", split="blocks:2"):
        found, _ = run(weights(), batch()[0])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)


def test_roles_are_kept_under_differentiation(data_mesh):
    """A trainer may add a part of aux to its loss."""

    def total(loss):
        def function(w):
            value, aux = loss(w, *batch())
            return value + aux["xent_sum"] + jnp.sum(aux["scores"] ** 2) + aux["first"]

        return jax.grad(function)(weights())

    def loss(w, x, mask):
        value, aux = loss_fn(w, x, mask)
        return value, aux | {"first": jnp.sum(w**2)}

    how = {"mesh": data_mesh(NUM_WORKERS), "axis_name": "data", "method": "exact"}
    roles = {"has_aux": True, "aux": ROLES | {"first": "same"}, "num_targets": num_targets}
    found = total(dq.data_parallel(loss, **how, **roles))
    np.testing.assert_allclose(found, total(loss), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", (bool, jnp.int8, jnp.bfloat16, jnp.float32))
def test_dtypes_of_roles(data_mesh, dtype):
    def loss(w, x):
        return jnp.mean(x @ w), {name: jnp.ones((), dtype) for name in ("mean", "sum", "same")}

    aux = {name: name for name in ("mean", "sum", "same")}
    for run in both(data_mesh, loss, aux=aux):
        (_, found), _ = run(weights(), batch()[0])
        floating = jnp.issubdtype(dtype, jnp.floating)
        assert found["same"].dtype == dtype and float(found["same"]) == 1
        assert found["mean"].dtype == (dtype if floating else jnp.float32)
        assert found["sum"].dtype == (dtype if floating else jnp.int32)
        assert float(found["mean"]) == 1 and float(found["sum"]) == NUM_WORKERS


def test_a_value_that_is_not_the_same_after_all_is_that_of_the_first_worker(data_mesh):
    def loss(w, x):
        return jnp.mean(x @ w), x[0, 0]

    x = batch()[0]
    for run in both(data_mesh, loss, aux="same"):
        (_, found), _ = run(weights(), x)
        assert float(found) == float(x[0, 0])


def test_a_key_may_be_the_same(data_mesh):
    def loss(w, x, key):
        return jnp.mean(x @ w), jax.random.split(key)

    key = jax.random.key(1)
    for run in both(data_mesh, loss, aux="same"):
        (_, found), _ = run(weights(), batch()[0], key)
        assert (found == jax.random.split(key)).all()


def test_aux_without_arrays_needs_no_role(data_mesh):
    for run in both(data_mesh, lambda w, x: (jnp.mean(x @ w), {"none": None})):
        (_, aux), _ = run(weights(), batch()[0])
        assert aux == {"none": None}


@pytest.mark.parametrize(
    ("aux", "words"),
    (
        (None, r"returns 5 arrays .* such as aux\['loss'\] .*aux=\{'loss': 'mean', 'rate': "),
        ({"loss": "mean"}, r"aux=\{'loss': 'mean'\} does not fit what the loss returns"),
        (ROLES | {"scores": None}, r"such as aux\['scores'\] of shape \(4,\)"),
        ("rows", r"aux\['loss'\] is a scalar and has no rows"),
        ("average", "aux holds 'average'. Give one of 'mean', 'sum', 'rows', 'same'"),
        ({"loss": 1}, "aux holds 1"),
    ),
)
def test_arrays_without_a_fitting_role_are_an_error(data_mesh, aux, words):
    with pytest.raises(ValueError, match=words):
        for run in both(data_mesh, loss_fn, aux=aux):
            run(weights(), *batch())


def test_roles_without_aux_are_an_error(data_mesh):
    with pytest.raises(ValueError, match="aux='mean' is given, but has_aux=False"):
        both(data_mesh, loss_fn, aux="mean", has_aux=False)


def test_rows_of_a_batch_that_is_split_in_two_ways_are_an_error(data_mesh):
    def loss(w, x, y):
        return jnp.mean(x @ w) + jnp.mean(y), x[:, 0]

    with pytest.raises(ValueError, match="with 16 rows are split in 2 ways"):
        for run in both(data_mesh, loss, aux="rows", split={"x": "blocks:2"}):
            run(weights(), *[batch()[0]] * 2)
