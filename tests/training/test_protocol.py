"""The one form of all train steps: a frozen description, its first state, and a step."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import training
from tests.support.hlo import collectives

WORKERS = 4
PARAMS = {"w": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def descriptions(mesh):
    """Each description, and the name of its step."""
    sgd = optax.sgd(0.5, momentum=0.9)
    return {
        "update": training.LocalSGD(axis_name="data", every=1),
        "step": training.Pipelined(optimizer=sgd, axis_name="data"),
        "drop_compute": training.DropCompute(
            loss_fn=loss_fn,
            optimizer=sgd,
            mesh=mesh,
            axis_name="data",
            threshold=10.0,
            devices_per_worker=1,
        ),
    }


@pytest.mark.parametrize("name", ["update", "step", "drop_compute"])
def test_all_have_one_form(data_mesh, name):
    mesh = data_mesh(WORKERS)
    description = descriptions(mesh)[name]
    with pytest.raises(dataclasses.FrozenInstanceError):
        description.axis_name = "other"
    if name == "drop_compute":
        state = description.init(PARAMS)
    else:
        on_mesh = jax.shard_map(
            description.init, mesh=mesh, in_specs=P(), out_specs=description.state_specs
        )
        state = jax.jit(on_mesh)(PARAMS)
    specs = description.state_specs
    assert isinstance(state, tuple) and state._fields and type(specs) is type(state)
    # Specs are a prefix of the state.
    jax.tree.map(lambda spec, part: None, specs, state, is_leaf=lambda x: isinstance(x, P))
    step = getattr(description, "update" if name == "update" else "step")
    first, second = list(inspect.signature(step).parameters.values())[:2]
    assert second.name == "state" and first.default is second.default is inspect.Parameter.empty
    assert inspect.signature(step).return_annotation.__args__[1] is type(state)
    axis_size = () if name == "drop_compute" else (WORKERS,)
    assert description.wire_report(PARAMS, *axis_size)


def test_at_most_fourteen_names_are_exported():
    assert len(training.__all__) <= 14
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


def test_drop_compute_sends_what_is_reported(data_mesh):
    mesh = data_mesh(WORKERS)
    description = descriptions(mesh)["drop_compute"]
    batch = np.ones((2 * WORKERS, 64), np.float32)
    state = description.init(PARAMS)
    sums = description._accumulation.run(state.params, [batch], np.inf, 0).sums
    text = description._apply.lower(sums, np.int32(1), state).compile().as_text()
    sent = sum(each.sent_bytes(WORKERS) for each in collectives(text))
    three_numbers = 3 * 4 * 2 * (WORKERS - 1) / WORKERS
    report = description.wire_report(PARAMS)
    assert sent - three_numbers == report.bytes_per_worker
    assert report.compressed_size == PARAMS["w"].size and report == dq.wire_report(PARAMS, WORKERS)
