"""Steps that are objects or their methods: what they hold decides which program runs."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from tests.compress.forms import PARAMS, X, Y, mapped, mean_loss
from tests.support.workers import STOCHASTIC

METHOD = "bf16"


@dataclasses.dataclass
class Settings:
    """Settings that may change, and so have no hash."""

    scale: float = 1.0


class Scaled:
    """Object that is called, with attributes that a compressed step has too."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.traces = 0
        self.scale = 1.0
        self.settings = Settings()
        self.rule = {"sign": "plus", "names": {"w", "v"}}
        self.table = {1: {"scale": 1.0}, "first": Settings()}  # JAX cannot sort its keys
        self._key = "mine"
        self._fun = None
        self.report = "mine"

    def factor(self):
        sign = 1 if self.rule["sign"] == "plus" else -1
        scale = self.scale * self.settings.scale
        scale *= self.table[1]["scale"] * self.table["first"].scale
        return sign * scale * len(self.rule["names"])

    def __call__(self, params, x, y):
        def local(*args):
            gradient = jax.grad(mean_loss)(*args)
            return jax.tree.map(lambda leaf: leaf * jnp.float32(self.factor()), gradient)

        return mapped(local, self.mesh)(params, x, y)


@pytest.fixture
def scaled(data_mesh):
    return Scaled(data_mesh(2))


def test_attributes_of_an_object_do_not_replace_those_of_its_step(scaled):
    step = dq.compress(scaled, "data", method=METHOD)
    got = step(PARAMS, X, Y)
    assert 1e-8 < dq.vnmse(got, jax.jit(scaled.__call__)(PARAMS, X, Y)) < 1e-4
    assert len(step.report(PARAMS, X, Y).compressed) == 2
    assert step.__wrapped__ is scaled


CHANGES = {
    "a number": lambda scaled: setattr(scaled, "scale", 3.0),
    "a number inside of another object": lambda scaled: setattr(scaled.settings, "scale", 3.0),
    "another object": lambda scaled: setattr(scaled, "settings", Settings(3.0)),
    "a text": lambda scaled: scaled.rule.update(sign="minus"),
    "a number under keys of several types": lambda scaled: scaled.table[1].update(scale=3.0),
    "another object there": lambda scaled: setattr(scaled.table["first"], "scale", 3.0),
    "a set": lambda scaled: scaled.rule["names"].add("b"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_method", [False, True])
def test_a_changed_attribute_runs_another_program(scaled, change, is_method):
    fun = scaled.__call__ if is_method else scaled
    step = dq.compress(fun, "data", method=METHOD)
    before = step(PARAMS, X, Y)
    CHANGES[change](scaled)
    after = step(PARAMS, X, Y)
    assert 1e-8 < dq.vnmse(after, jax.jit(scaled.__call__)(PARAMS, X, Y)) < 1e-4
    assert dq.vnmse(after, before) > 0.1


def test_an_unchanged_object_is_traced_once(scaled):
    traces = []

    class Counted(Scaled):
        def factor(self):
            traces.append(self.scale)
            return super().factor()

    counted = Counted(scaled.mesh)
    step = dq.compress(counted, "data", method=METHOD)
    for scale in (1.0, 1.0, 2.0, 1.0, 2.0):
        counted.scale = scale
        step(PARAMS, X, Y)
    assert traces == 3 * [1.0] + 3 * [2.0]  # once for each leaf


def test_an_attribute_that_changes_at_every_step_is_named_in_a_warning(scaled):
    step = dq.compress(scaled, "data", method=METHOD)
    with pytest.warns(UserWarning, match=r"compiled again.*'traces'"):
        for number in range(12):
            scaled.traces = number
            step(PARAMS, X, Y)


def test_an_argument_that_changes_at_every_step_is_named_in_a_warning(scaled):
    """It is compiled for eight values at a time."""
    traces = []

    def step(params, x, y, rates, *, scale=1):
        traces.append((rates["all"], scale))
        return jax.tree.map(lambda leaf: rates["all"] * scale * leaf, scaled(params, x, y))

    compressed = dq.compress(step, "data", method=STOCHASTIC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(8):
            compressed.trace(PARAMS, X, Y, {"all": 0.1 * number}, scale=2)
        compressed.trace(PARAMS, X, Y, {"all": 0.1 * 7}, scale=2)
        compressed.trace(PARAMS, X, Y, {"all": 1}, scale=2)  # of another type
    assert len(set(traces)) == len(traces) == 9
    with pytest.warns(UserWarning, match=r"compiled again.*\"argument 3\['all'\]\", .*'scale'"):
        compressed.trace(PARAMS, X, Y, {"all": 0.8}, scale=3)
    compressed.trace(PARAMS, X, Y, {"all": 0.0}, scale=2)  # the oldest one
    assert traces[9:] == [(0.8, 3), (0.0, 2)]


def test_a_cycle_of_objects_is_followed_once(scaled):
    scaled.settings.owner = scaled
    step = dq.compress(scaled, "data", method=METHOD)
    before = step(PARAMS, X, Y)
    np.testing.assert_array_equal(step(PARAMS, X, Y)["w"], before["w"])
    scaled.settings.scale = 2.0
    assert dq.vnmse(step(PARAMS, X, Y), before) > 0.1


def test_an_assigned_attribute_is_the_first_error(data_mesh):
    """Also where there is no sum to compress: the assignment may be the reason."""

    class Trainer:
        def small(self, x):
            self.mean = mapped(
                lambda x: lax.pmean(jnp.sum(x), "data"), data_mesh(2), specs=P("data")
            )(x)

    with pytest.raises(TypeError, match="attributes of an object"):
        dq.compress(Trainer().small, "data")(X)
