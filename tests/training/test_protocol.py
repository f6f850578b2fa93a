"""The one form of all train steps: a frozen description, its first state, and a step."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dynamiq_jax import training

WORKERS = 4
PARAMS = {"w": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def descriptions():
    """Each description, and the name of its step."""
    sgd = optax.sgd(0.5, momentum=0.9)
    return {
        "update": training.LocalSGD(axis_name="data", every=1),
        "step": training.Pipelined(optimizer=sgd, axis_name="data"),
    }


@pytest.mark.parametrize("name", ["update", "step"])
def test_all_have_one_form(data_mesh, name):
    mesh = data_mesh(WORKERS)
    description = descriptions()[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        description.axis_name = "other"
    on_mesh = jax.shard_map(
        description.init, mesh=mesh, in_specs=P(), out_specs=description.state_specs
    )
    state = jax.jit(on_mesh)(PARAMS)
    specs = description.state_specs
    assert isinstance(state, tuple) and state._fields and type(specs) is type(state)
    # Specs are a prefix of the state.
    jax.tree.map(lambda spec, part: None, specs, state, is_leaf=lambda x: isinstance(x, P))
    step = getattr(description, name)
    first, second = list(inspect.signature(step).parameters.values())[:2]
    assert second.name == "state" and first.default is second.default is inspect.Parameter.empty
    assert inspect.signature(step).return_annotation.__args__[1] is type(state)
    assert description.wire_report(PARAMS, WORKERS)


def test_at_most_eight_names_are_exported():
    assert len(training.__all__) <= 8
    assert all(hasattr(training, name) for name in training.__all__)


def test_a_pipelined_step_is_its_halves_around_a_function(data_mesh):
    mesh = data_mesh(WORKERS)
    pipelined = training.Pipelined(
        optimizer=optax.sgd(0.5, momentum=0.9), axis_name="data", method="bf16"
    )
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
