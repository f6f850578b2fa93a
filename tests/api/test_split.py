"""Rows that belong together: blocks, groups and rules of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._worker_loss.rows import BlockSplit, GroupSplit

ROWS, IN, OUT = 16, 32, 48
KEY = jax.random.key(0)


def weights():
    return jax.random.normal(jax.random.key(1), (IN, OUT))


def inputs():
    return jax.random.normal(jax.random.key(2), (ROWS, IN)) * jnp.linspace(0.1, 2, ROWS)[:, None]


def pairs(w, rows):
    """The loss of DPO: chosen rows are stacked before rejected ones."""
    scores = jnp.mean(rows @ w, axis=-1)
    chosen, rejected = jnp.split(scores, 2)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


def groups(w, rows):
    """A loss like GRPO: scores are compared with the mean of a group of four neighbors."""
    scores = jnp.mean(rows @ w, axis=-1).reshape(-1, 4)
    return jnp.mean((scores - scores.mean(axis=1, keepdims=True)) ** 2)


def every_other(rows, workers):
    return np.arange(rows).reshape(-1, workers).T


def every_other_of_jax(rows, workers):
    return jnp.arange(rows).reshape(-1, workers).T


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected
    )


def both(data_mesh, loss_fn, workers=4, **arguments):
    """Return the loss and gradients of both functions, exact, of one call."""
    how = {"mesh": data_mesh(workers), "axis_name": "data", "method": "exact"} | arguments
    return (
        jax.value_and_grad(dq.data_parallel(loss_fn, **how), has_aux="aux" in arguments),
        lambda *args: dq.value_and_grad(loss_fn, **how)(*args, key=KEY),
    )


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_every_worker_has_its_rows_of_every_block(count, workers, each):
    rows = count * workers * each
    order = BlockSplit(count)(rows, workers)
    assert sorted(order.ravel()) == list(range(rows))
    block, within = np.divmod(order, workers * each)
    for worker in range(workers):
        first = within[worker][:each]
        np.testing.assert_array_equal(first, worker * each + np.arange(each))
        np.testing.assert_array_equal(within[worker], np.tile(first, count))
        np.testing.assert_array_equal(block[worker], np.repeat(np.arange(count), each))


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 6))
def test_a_group_is_on_one_worker_or_refused(rows, size, workers):
    if rows % (size * workers):
        with pytest.raises(ValueError, match=f"a multiple of {size * workers} rows"):
            GroupSplit(size)(rows, workers)
    else:
        for group in GroupSplit(size)(rows, workers).reshape(-1, size) // size:
            assert len(set(group)) == 1


@pytest.mark.parametrize(
    ("loss_fn", "split"), ((pairs, "blocks:2"), (groups, "groups:4"), (groups, None))
)
def test_rows_that_belong_together_have_the_loss_of_the_batch(data_mesh, loss_fn, split):
    expected = jax.value_and_grad(loss_fn)(weights(), inputs())
    for run in both(data_mesh, loss_fn, split=split):
        close(run(weights(), inputs()), expected)


def test_pairs_that_are_cut_have_another_loss(data_mesh):
    expected = pairs(weights(), inputs())
    for run in both(data_mesh, pairs):
        assert abs(run(weights(), inputs())[0] / expected - 1) > 0.1


@pytest.mark.parametrize("split", (every_other, every_other_of_jax))
def test_a_rule_of_ones_own_says_the_rows_of_each_worker(data_mesh, split):
    def loss_fn(w, rows):
        return jnp.mean(rows @ w), rows[0]

    for run in both(data_mesh, loss_fn, split=split, has_aux=True, aux="rows"):
        (_, first), _ = run(weights(), inputs())
        np.testing.assert_array_equal(first.reshape(4, IN), inputs()[:4])


@pytest.mark.parametrize("split", ({"rows": "blocks:2"}, {1: {"a": "blocks:2", "b": None}}))
def test_a_rule_may_be_of_one_argument_or_of_a_part_of_it(data_mesh, split):
    """Weights of pairs are half as many as rows, and neighbors."""

    def loss_fn(w, rows, scales):
        rows = rows["a"] if isinstance(rows, dict) else rows
        scores = jnp.mean(rows @ w, axis=-1)
        return jnp.mean((scores[: len(scores) // 2] - scores[len(scores) // 2 :]) ** 2 * scales)

    rows = {"a": inputs(), "b": jnp.zeros(ROWS)} if 1 in split else inputs()
    args = weights(), rows, jnp.arange(ROWS // 2.0)
    in_specs = (None, P("data"), P("data"))
    for run in both(data_mesh, loss_fn, split=split, in_specs=in_specs):
        close(run(*args), jax.value_and_grad(loss_fn)(*args))


def test_rows_may_be_along_another_axis(data_mesh):
    def loss_fn(w, columns):
        return pairs(w, columns.T)

    args = weights(), inputs().T
    for run in both(data_mesh, loss_fn, split="blocks:2", in_specs=(None, P(None, "data"))):
        close(run(*args), jax.value_and_grad(loss_fn)(*args))


def test_keys_of_examples_go_with_their_rows(data_mesh):
    keys = jax.random.split(KEY, ROWS)

    def loss_fn(w, rows, keys):
        return pairs(w, rows + jax.vmap(lambda key: jax.random.normal(key, (IN,)))(keys))

    for run in both(data_mesh, loss_fn, split="blocks:2"):
        close(
            run(weights(), inputs(), keys), jax.value_and_grad(loss_fn)(weights(), inputs(), keys)
        )


@pytest.mark.parametrize(
    ("split", "error", "words"),
    (
        ("blocks:3", ValueError, "Argument 1 has shape .16, 32.: 3 blocks of 16 rows.*12 rows"),
        ("groups:8", ValueError, "Argument 1 has shape .16, 32.: groups of 8 rows.*32 rows"),
        ({"w": "blocks:2"}, ValueError, r"split\['w'\] holds .* is differentiated"),
        (
            {"x": "blocks:2"},
            ValueError,
            r"split names 'x', but the arguments",
        ),
        ({1: ["blocks:2"] * 2}, ValueError, r"split\[1\]=.* does not fit the argument"),
        (2, TypeError, r'split holds 2. Give "blocks:2"'),
        (("blocks:2",), TypeError, r"split holds \('blocks:2',\)"),
        ("block:2", ValueError, "split holds 'block:2', which is no rule"),
        ("blocks", ValueError, "split holds 'blocks', which is no rule"),
        ({1: "groups:x"}, ValueError, "split holds 'groups:x', which is no rule"),
        ("groups:0", ValueError, "size=0 is not possible"),
        (lambda rows, workers: np.zeros((workers, rows // workers), int), ValueError, "is once"),
        (lambda rows, workers: np.arange(rows), ValueError, r"array of shape \(4, 4\)"),
    ),
)
def test_rules_that_do_not_fit(data_mesh, split, error, words):
    with pytest.raises(error, match=words):
        for run in both(data_mesh, pairs, split=split):
            run(weights(), inputs())


@pytest.mark.parametrize("value", (0, -1, 2.0, True))
def test_blocks_and_groups_are_counted_in_integers(value):
    for rule, name in ((BlockSplit, "count"), (GroupSplit, "size")):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            rule(value)
