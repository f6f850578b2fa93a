"""Pipelined steps: laws that they share with other functions and train steps of the product."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_research import Pipelined, allocate_bits
from dynamiq_research.pipelined.halves import ScatterMean
from research.tests.test_allocate_bits import APART, SCALES, leaves_of, of_workers
from tests.api import test_axis_names, test_replaced_state, test_settings
from tests.buckets import test_sizes
from tests.support.workers import STOCHASTIC
from tests.training.test_protocol import PARAMS, WORKERS, check_form

SGD = optax.sgd(0.5, momentum=0.9)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def test_it_has_the_form_of_train_steps(data_mesh):
    check_form(Pipelined(optimizer=SGD, axis_name="data"), "step", data_mesh(WORKERS))


def test_a_pipelined_step_is_its_halves_around_a_function(data_mesh):
    mesh = data_mesh(WORKERS)
    pipelined = Pipelined(optimizer=SGD, axis_name="data", method="bf16")
    specs = pipelined.state_specs

    def value_and_grads(params, x):
        return jax.value_and_grad(loss_fn)(params, x)

    def whole(state, x):
        loss, state = pipelined.step(lambda params: value_and_grads(params, x), state)
        return loss[None], state

    def halves(state, x):
        updated = pipelined.gather(state)
        own = jax.lax.pcast(updated.params, "data", to="varying")
        loss, grads = value_and_grads(own, x)
        return loss[None], pipelined.scatter(grads, updated)

    begin = jax.jit(jax.shard_map(pipelined.init, mesh=mesh, in_specs=P(), out_specs=specs))
    ends = []
    for step in (whole, halves):
        mapped = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P("data"), specs)
            )
        )
        state, losses = begin(PARAMS), []
        for number in range(3):
            x = np.random.default_rng(number).normal(size=(8 * WORKERS, 64)).astype(np.float32)
            loss, state = mapped(state, x)
            losses.append(np.asarray(loss))
        assert losses[2].mean() < losses[0].mean() and len(set(losses[2].tolist())) == WORKERS
        ends.append((losses, state))
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.slow
def test_pipelined_steps_send_no_more_bytes_and_have_less_error(data_mesh):
    tree = leaves_of(SCALES)
    stacked = of_workers(tree, 2)
    truth = jax.tree.map(lambda leaf: leaf.mean(0, dtype=np.float64), stacked)
    uniform = dq.DynamiQ(rounding="correlated")
    found = allocate_bits(tree, axis_size=2, method=dataclasses.replace(APART, method=uniform))
    sent, errors = [], []
    for method in (uniform, found.policy):
        pipelined = Pipelined(
            optimizer=optax.sgd(1.0),
            axis_name="data",
            method=dataclasses.replace(APART, method=method),
        )

        @jax.jit
        @jax.shard_map(mesh=data_mesh(2), in_specs=P("data"), out_specs=P())
        def run(stacked, pipelined=pipelined):
            own = jax.tree.map(lambda leaf: leaf[0], stacked)
            params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), own)
            updated = pipelined.gather(pipelined.init(params))
            return pipelined.flush(pipelined.scatter(own, updated))

        sent.append(pipelined.wire_report(tree, 2).bytes_per_worker)
        after = run(stacked)
        errors.append(sum(np.sum((np.asarray(after[n]) + truth[n]) ** 2) for n in tree))
    assert 0.99 * sent[0] <= sent[1] <= sent[0]
    assert errors[0] > 4 * errors[1]


def of_gradients(tree):
    step = Pipelined(optimizer=optax.sgd(0.1), axis_name="data")
    return step.scatter(tree, step.gather(step.init(tree))).shards


@pytest.mark.parametrize("state", ((1024,), (4,)), ids=str)
def test_it_refuses_a_state_among_gradients(state, data_mesh):
    name, tree = test_replaced_state.NAME, test_replaced_state.tree_of(state)
    with pytest.raises(ValueError, match=rf"tree\['{name}'\]\['dense'\] is no gradient"):
        jax.eval_shape(test_replaced_state.in_map(lambda: of_gradients(tree), data_mesh(2)))


@pytest.mark.parametrize("axis_name", test_axis_names.NOT_DIFFERENT, ids=repr)
def test_axes_are_named_once_and_by_text(axis_name):
    mesh = jax.make_mesh(
        (2, 2), ("hosts", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    init = test_axis_names.inside(
        lambda rows, axis: Pipelined(optimizer=optax.sgd(0.1), axis_name=axis).init(rows)
    )
    with pytest.raises(ValueError, match=r"axis_name=.*Give"):
        init(mesh, axis_name)


def test_64_bits_change_nothing(data_mesh):
    train = Pipelined(optimizer=optax.sgd(1e-2, momentum=0.9), axis_name="data", method=STOCHASTIC)

    def run(params, moves):
        state = train.init(params)
        for _ in range(2):
            state = train.scatter({"w": moves[0]}, train.gather(state))
        return jax.tree.map(lambda leaf: leaf[None], train.gather(state).params)

    gradients = test_settings.gradients()
    mesh = data_mesh(test_settings.NUM_WORKERS)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    test_settings.check_same(lambda: mapped, {"w": gradients[0]}, gradients)


@pytest.mark.parametrize("size", test_sizes.BORDERS)
def test_a_leaf_beyond_32_bits_is_refused(size):
    rules = ScatterMean(test_sizes.HIERARCHY).rules(dq.Compression())
    leaves = [test_sizes.leaf(2, size)]
    with pytest.raises(ValueError, match=f"leaf 0 has {2 * size:,} .*Cut the leaf"):
        test_sizes.plan_of(leaves, test_sizes.HIERARCHY, rules=rules)
