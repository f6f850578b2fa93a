"""Steps that are methods or get objects: compressed as `jax.jit` compiles them."""

import copy
import dataclasses
import functools
import gc
import pickle
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax._rewriting import compressed_step
from tests.compress.forms import PARAMS, X, Y, loss_fn, mapped, mean_loss
from tests.support.workers import STOCHASTIC

METHOD = "bf16"


class Trainer:
    """Object with attributes that a compressed step has, too."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.losses = []
        self.traces = 0
        self.scale = 2.0
        self.tables = {"a": 0, 1: 1}  # keys without order, of which JAX makes no tree
        self._key = "mine"
        self.report = "mine"

    def step(self, params, x, y):
        self.traces += 1
        gradient = mapped(lambda *args: jax.grad(mean_loss)(*args), self.mesh)(params, x, y)
        return jax.tree.map(lambda leaf: leaf * jnp.float32(self.scale), gradient)

    __call__ = step

    decorated = dq.compress(step, "data", method=METHOD)


@pytest.fixture
def trainer(data_mesh):
    return Trainer(data_mesh(2))


@pytest.mark.parametrize("of", [lambda t: t, lambda t: t.step, lambda t: t.decorated])
def test_an_object_that_changes_is_traced_once(of, trainer):
    fun = of(trainer)
    step = fun if isinstance(fun, dq.CompressedStep) else dq.compress(fun, "data", method=METHOD)
    for number in range(3):
        step(PARAMS, X, Y)
        trainer.losses.append(number)
    assert trainer.traces == 1
    before = step(PARAMS, X, Y)
    trainer.scale = 4.0  # a constant of the program, as in jax.jit
    np.testing.assert_array_equal(step(PARAMS, X, Y)["w"], before["w"])
    assert len(step.report(PARAMS, X, Y).compressed) == 2
    assert "stablehlo" in step.lower(PARAMS, X, Y).as_text()
    assert step.trace(PARAMS, X, Y).jaxpr.out_avals


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """Module of flax or equinox: its jitted step is a method, of which it is the first argument."""

    params: dict

    @functools.partial(jax.jit, donate_argnums=0)
    def exact(self, x, y):
        gradient = jax.grad(loss_fn)(self.params, x, y)
        return Module(jax.tree.map(lambda w, g: w - 0.1 * g, self.params, gradient))

    compressed = dq.compress(exact, "data", method="exact")


def test_a_method_of_an_object_of_traced_arrays(mesh):
    """The object is an argument of the map around: the step has left nothing in it."""

    def of_worker(module, x, y):
        return dq.compress(lambda *a: module_step(module, *a), "data", method="exact")(x, y)

    def module_step(module, x, y):
        return jax.lax.pmean(jax.grad(loss_fn)(module.params, x, y), "data")

    class Holder:
        def __init__(self, module):
            self.module = module

        def step(self, x, y):
            return module_step(self.module, x, y)

    def of_method(module, x, y):
        return dq.compress(Holder(module).step, "data", method="exact")(x, y)

    found, expected = (
        jax.jit(mapped(each, mesh, check_vma=False))(Module(PARAMS), X, Y)
        for each in (of_method, of_worker)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Static:
    """Object that is a static argument of its jitted step."""

    def __init__(self, rate):
        self.rate = rate

    @functools.partial(jax.jit, static_argnums=0)
    def exact(self, params, x, y):
        gradient = jax.grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda w, g: w - self.rate * g, params, gradient)

    compressed = dq.compress(exact, "data", method="exact")


def test_a_jitted_method_has_its_own_object_in_each_call(data_mesh):
    mesh = data_mesh(2)
    x, y = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
    start = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    exact, ours = (Module(jax.tree.map(jnp.copy, start)) for _ in range(2))
    for _ in range(3):
        before = ours
        exact, ours = exact.exact(x, y), ours.compressed(x, y)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), exact, ours
        )
        assert jax.tree.leaves(before)[0].is_deleted()
    assert ours.compressed.report(x, y).compressed
    for rate in (0.1, 0.5):
        trainer = Static(rate)
        expected, got = trainer.exact(start, x, y), trainer.compressed(start, x, y)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, got
        )


@pytest.mark.parametrize("wrap", (jax.jit, lambda fun: fun), ids=("jitted", "plain"))
def test_shapes_of_results_are_those_of_the_step(wrap, data_mesh):
    step = wrap(mapped(lambda *a: jax.grad(mean_loss)(*a), data_mesh(2)))
    compressed = dq.compress(step, "data", method=METHOD, missing_ok=True)
    found = compressed.eval_shape(PARAMS, X, Y)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), found) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), PARAMS
    )


def test_methods_of_two_objects_are_two_programs(data_mesh):
    first, second = Trainer(data_mesh(2)), Trainer(data_mesh(2))
    second.scale = 6.0
    ratio = second.decorated(PARAMS, X, Y)["w"] / first.decorated(PARAMS, X, Y)["w"]
    np.testing.assert_allclose(ratio, 3.0, rtol=1e-2)


def test_attributes_of_an_object_do_not_replace_those_of_its_step(trainer):
    step = dq.compress(trainer, "data", method=METHOD)
    got = step(PARAMS, X, Y)
    assert 1e-8 < dq.vnmse(got, jax.jit(trainer.step)(PARAMS, X, Y)) < 1e-4
    assert step.__wrapped__ is trainer


def scaled(params, x, y, rate, *, twice=False, count=1):
    gradient = jax.grad(mean_loss)(params, x, y)
    return jax.tree.map(lambda leaf: sum([rate * leaf] * count) * (1 + twice), gradient)


def test_floats_are_traced_and_other_values_are_constants(data_mesh):
    traces = []

    def step(*args, **kwargs):
        traces.append(kwargs)
        whole = mapped(
            lambda *args: scaled(*args, **kwargs),
            data_mesh(2),
            specs=(P(), P("data"), P("data"), P()),
        )
        return whole(*args)

    compressed = dq.compress(step, "data", method=METHOD)
    one = compressed(PARAMS, X, Y, 1.0)
    for rate in (0.5, 3.0):
        got = compressed(PARAMS, X, Y, rate)
        np.testing.assert_allclose(got["w"], rate * one["w"], rtol=2e-2, atol=1e-6)
    assert len(traces) == 1
    twice = compressed(PARAMS, X, Y, 1.0, twice=True, count=2)
    np.testing.assert_allclose(twice["w"], 4 * one["w"], rtol=2e-2, atol=1e-6)
    assert len(traces) == 2


def test_many_constants_are_a_warning(data_mesh):
    step = mapped(lambda *args: scaled(*args), data_mesh(2), specs=(P(), P("data"), P("data"), P()))
    compressed = dq.compress(
        lambda *args, count: step(*args, jnp.float32(count)), "data", method=STOCHASTIC
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in (*range(8), 3):
            compressed.trace(PARAMS, X, Y, count=count)
    with pytest.warns(UserWarning, match=r"compiled again, after 8 times.*arrays or Python floats"):
        compressed.trace(PARAMS, X, Y, count=9)


def test_a_step_that_jax_jits_has_numpy_numbers_as_static_arguments(data_mesh):
    step = mapped(scaled, data_mesh(2), specs=(P(), P("data"), P("data"), P()))
    jitted = jax.jit(lambda *args, count: step(*args, np.float32(count)), static_argnames="count")
    compressed = dq.compress(jitted, "data", method=METHOD)
    for count in (np.int64(2), np.float32(2), 2):
        got = compressed(PARAMS, X, Y, count=count)
        np.testing.assert_array_equal(got["w"], compressed(PARAMS, X, Y, count=2)["w"])
        assert compressed.report(PARAMS, X, Y, count=count).compressed
    dynamic = dq.compress(jax.jit(step), "data", method=METHOD)
    traced = [dynamic(PARAMS, X, Y, np.float32(rate))["w"] for rate in (1, 2)]
    np.testing.assert_array_equal(2 * traced[0], traced[1])


def test_objects_of_which_a_step_is_the_method_do_not_live_forever(data_mesh, monkeypatch):
    """Each one is a constant of a program, of which the last ones are kept."""
    monkeypatch.setattr(compressed_step, "_MOST", 3)
    step = mapped(lambda *args: scaled(*args, jnp.float32(1)), data_mesh(2))

    class Trainer:
        @functools.partial(dq.compress, axis_name="data", method=METHOD)
        def train(self, *args):
            return step(*args)

    trainers = [Trainer() for _ in range(5)]
    alive = [weakref.ref(each) for each in trainers]
    for each in trainers:
        each.train.trace(PARAMS, X, Y)
    del trainers, each
    gc.collect()
    assert [each() is not None for each in alive] == [False, False, True, True, True]


def test_an_assigned_attribute_is_an_error(data_mesh):
    """Also where there is no sum to compress: the assignment may be the reason."""

    class Assigns:
        def small(self, x):
            self.mean = mapped(
                lambda x: lax.pmean(jnp.sum(x), "data"), data_mesh(2), specs=P("data")
            )(x)

        decorated = dq.compress(small, "data")

    for step in (dq.compress(Assigns().small, "data"), Assigns().decorated):
        with pytest.raises(TypeError, match="attributes of an object"):
            step(X)


def gradient_of_two_workers(params, x, y):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return mapped(lambda *args: jax.grad(mean_loss)(*args), mesh)(params, x, y)


def test_steps_are_copied_and_pickled_as_their_functions_are():
    step = dq.compress(gradient_of_two_workers, "data", method=METHOD)
    expected = step(PARAMS, X, Y)
    for again in (copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        np.testing.assert_array_equal(again(PARAMS, X, Y)["w"], expected["w"])


def test_threads_share_a_step(trainer):
    step = dq.compress(trainer.step, "data", method=METHOD)
    results = []
    threads = [threading.Thread(target=lambda: results.append(step(PARAMS, X, Y))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in results:
        np.testing.assert_array_equal(each["w"], results[0]["w"])
    assert len(results) == 3
