"""Settings of JAX that change how programs are traced: numbers of 64 bits, no implicit promotion of
ranks, and checks of NaN and of types. Law: for values of at most 32 bits, a program has the same
arrays with `jax_enable_x64` as without, and returns the same bits.

All other tests run without implicit promotion of ranks: see `plugin.py`. `make test-x64` runs the
conformance tests with `jax_enable_x64`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.methods import resolve_method
from dynamiq_jax.methods._registry import PRESETS
from dynamiq_jax.topologies import TOPOLOGIES
from dynamiq_jax.training import LocalSGD
from tests.conformance.table import CASES, CHUNKED, ROWS
from tests.support.gradients import of_workers
from tests.support.workers import STOCHASTIC, TWO_WIDTHS, described, mapped

NUM_WORKERS, SHAPE = 4, (24, 256)
NAMES = {**CASES, **{name: resolve_method(name) for name in PRESETS}}
# In the largest array of 64-bit integers that JAX itself makes, to index arrays.
MOST_NUMBERS = 8


def key() -> jax.Array:
    return jax.random.key(3)


def gradients(dtype=np.float32):
    return (
        of_workers(0, NUM_WORKERS, int(np.prod(SHAPE))).reshape(NUM_WORKERS, *SHAPE).astype(dtype)
    )


def check_same(make, *arguments, run=True):
    """Check the law for a program: `make` returns it, anew in each setting."""
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(make())(*arguments))
        for kind, shape in re.findall(r"\b([fiu])64\[([\d,]+)\]", text):
            assert kind != "f" and np.prod([int(size) for size in shape.split(",")]) <= MOST_NUMBERS
        found = jax.device_get(jax.jit(make())(*arguments)) if run else None
    if run:
        expected = jax.device_get(jax.jit(make())(*arguments))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert described(found) == described(expected)


def steps(method, topology="ring", **options):
    """Return a function of a gradient to two steps, with their state and metrics."""
    arguments = {"method": dq.Compression(method, topology, **options)}
    reduce = dq.all_reduce_gradients("data", with_metrics=True, **arguments)

    def fn(gradient):
        _, state = reduce.update(gradient, reduce.init(gradient))
        return reduce.update(gradient, state)

    return fn


# ---------------------------------------------------------------------------------------- 64 bits


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_every_method(name, data_mesh):
    def make():
        return mapped(steps(NAMES[name]), data_mesh(NUM_WORKERS))

    # Methods that draw, index or count in ways of their own are compiled, and others are traced.
    check_same(make, gradients(), run=name in ROWS and ROWS[name].draws)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", (*CHUNKED, "two widths"))
def test_every_half(name, data_mesh):
    method = dq.Compression(NAMES.get(name, TWO_WIDTHS), exact_below=0)

    def fn(gradient):
        part = dq.psum_scatter(gradient, "data", method, key=key(), tiled=True)
        return part, dq.all_gather(part, "data", method, key=key(), tiled=True)

    check_same(lambda: mapped(fn, data_mesh(NUM_WORKERS)), gradients(), run=name == "two widths")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("topology", (*TOPOLOGIES, "ring:unroll=True"))
@pytest.mark.parametrize("method", ("dynamiq", "mxfp4"))
def test_every_topology(method, topology, check_vma, data_mesh):
    fn, mesh = steps(method, topology), data_mesh(NUM_WORKERS)
    check_same(lambda: mapped(fn, mesh, check_vma=check_vma), gradients(), run=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "run"), ((TWO_WIDTHS, False), (STOCHASTIC, True)), ids=("dynamiq", "stochastic")
)
def test_sums_with_metrics_and_a_limit(method, run, data_mesh):
    choice = dq.Compression(method, max_error=1e-3, exact_below=0)

    def fn(gradient):
        arguments = {"method": choice, "with_metrics": True}
        return dq.psum(gradient, "data", key=key(), **arguments), dq.pmean(
            {"w": gradient, "n": jnp.int32(5), "b": gradient[0]}, "data", key=key(), **arguments
        )

    check_same(lambda: mapped(fn, data_mesh(NUM_WORKERS)), gradients(), run=run)


def test_dtypes(data_mesh):
    fn = steps(STOCHASTIC)
    tree = {dtype: gradients(jnp.dtype(dtype)) for dtype in ("bfloat16", "float16")}
    check_same(lambda: mapped(fn, data_mesh(NUM_WORKERS)), tree)


def test_train_steps(data_mesh):
    """Of functions that are differentiated."""
    mesh, method = data_mesh(NUM_WORKERS), STOCHASTIC
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((64, 96)).astype(np.float32), "b": np.zeros(96, np.float32)}
    batch = rng.standard_normal((32, 64)).astype(np.float32)

    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"][None, :]) ** 2)

    in_specs = jax.NamedSharding(mesh, P()), jax.NamedSharding(mesh, P("data"))
    step = dq.compress(jax.value_and_grad(loss), "data", in_specs=in_specs, method=method)
    check_same(lambda: step, params, batch)


def test_local_steps(data_mesh):
    mesh = data_mesh(NUM_WORKERS)
    params = {"w": gradients()[0]}
    train = LocalSGD(axis_name="data", every=2, method=STOCHASTIC)

    def run(params, moves):
        state = train.init(params)
        mine = jax.tree.map(lambda leaf: leaf + moves[0], params)
        for _ in range(2):
            mine, state = train.update(mine, state)
        return jax.tree.map(lambda leaf: leaf[None], mine)

    steps_of_all = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    check_same(lambda: steps_of_all, params, gradients())


# ----------------------------------------------------------------------------------------- checks


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_checks_of_nan_find_none(name, data_mesh):
    """Nor in lanes whose values are not used."""
    compiled = jax.jit(mapped(steps(NAMES[name]), data_mesh(NUM_WORKERS)))
    values = gradients()
    values[:, 3] = 0
    with jax.debug_nans(True):
        jax.block_until_ready(compiled(values))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ("dynamiq", "mxfp4"))
def test_internal_checks_of_jax_pass(method, data_mesh):
    with jax.enable_checks(True):
        jax.make_jaxpr(mapped(steps(method), data_mesh(NUM_WORKERS)))(gradients())
