"""DropCompute has the form of the train steps of the product, and sends what it reports."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_research import DropCompute
from tests.support.hlo import collectives

WORKERS = 4
PARAMS = {"w": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.fixture
def description(data_mesh) -> DropCompute:
    return DropCompute(
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.5, momentum=0.9),
        mesh=data_mesh(WORKERS),
        axis_name="data",
        threshold=10.0,
        devices_per_worker=1,
    )


def test_it_has_the_form_of_train_steps(description):
    with pytest.raises(dataclasses.FrozenInstanceError):
        description.axis_name = "other"
    state, specs = description.init(PARAMS), description.state_specs
    assert isinstance(state, tuple) and state._fields and type(specs) is type(state)
    # Specs are a prefix of the state.
    jax.tree.map(lambda spec, part: None, specs, state, is_leaf=lambda x: isinstance(x, P))
    first, second = list(inspect.signature(description.step).parameters.values())[:2]
    assert second.name == "state" and first.default is second.default is inspect.Parameter.empty
    assert inspect.signature(description.step).return_annotation.__args__[1] is type(state)


@pytest.mark.slow
def test_it_sends_what_is_reported(description):
    batch = np.ones((2 * WORKERS, 64), np.float32)
    state = description.init(PARAMS)
    sums = description._accumulation.run(state.params, [batch], np.inf, 0).sums
    text = description._apply.lower(sums, np.int32(1), state).compile().as_text()
    sent = sum(each.sent_bytes(WORKERS) for each in collectives(text))
    three_numbers = 3 * 4 * 2 * (WORKERS - 1) / WORKERS
    report = description.wire_report(PARAMS)
    assert sent - three_numbers == report.bytes_per_worker
    assert report.compressed_size == PARAMS["w"].size and report == dq.wire_report(PARAMS, WORKERS)
