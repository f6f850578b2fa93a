"""The one form of all train steps: a frozen description, its first state, and a step."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dynamiq_jax import training

WORKERS = 4
PARAMS = {"w": np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)}


def test_local_sgd_has_this_form(data_mesh):
    check_form(training.LocalSGD(axis_name="data", every=1), "update", data_mesh(WORKERS))


def check_form(description, name, mesh):
    """Check a description whose step has a name."""
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
