"""Pipelined steps: ordinary training, its bytes, order, norms and errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
import dynamiq_research
from benchmarks.speed.mesh_bytes import sent_by_axes
from dynamiq_research import Pipelined, PipelinedUpdate
from dynamiq_research.pipelined.dealing import ShiftedDealing
from research.tests.support.pipelined import (
    ADAMW,
    BUCKETS,
    CLIPPED_SGD,
    LAYERS,
    NORM_BYTES,
    WORKERS,
    Run,
    batches,
    close,
    equal,
    global_norm,
    oracle,
    start,
)
from tests.support.hlo import collectives
from tests.support.workers import STOCHASTIC


@pytest.fixture(scope="module")
def clipped(data_mesh) -> Run:
    return Run(data_mesh(WORKERS), clip_norm=0.5)


def test_nothing_happens_in_the_first_step_before_there_is_a_gradient(clipped):
    """Not by weight decay, nor in the count of Adam."""
    updated = clipped.gather(clipped.begin())
    equal(updated.params, start())
    equal(updated.opt_state, ADAMW.init(start()))
    assert (int(updated.step), float(updated.gradient_norm)) == (0, 0)
    updated = clipped.gather(clipped.train(clipped.begin(), batches(3))[0])
    assert int(updated.step) == int(updated.opt_state[0].count) == 3


def test_replicas_are_bit_identical(clipped):
    updated = clipped.gather(clipped.train(clipped.begin(), batches(2))[0])
    for leaf in jax.tree.leaves(updated):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(leaf.addressable_shards) == WORKERS and len(copies) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "optimizer, clip_norm, wrapped",
    (
        (ADAMW, None, ADAMW),
        (ADAMW, 0.3, optax.chain(optax.clip_by_global_norm(0.3), ADAMW)),
        # A transformation of the whole tree in the chain.
        (CLIPPED_SGD, None, CLIPPED_SGD),
    ),
    ids=("adamw", "clip_norm", "clipping in the chain"),
)
def test_it_is_ordinary_training_with_exact_means(data_mesh, optimizer, clip_norm, wrapped):
    run = Run(data_mesh(WORKERS), method="exact", optimizer=optimizer, clip_norm=clip_norm)
    xs = batches(4)
    losses, params, norms = oracle(xs, wrapped)
    state, found = run.train(run.begin(), xs)
    updated = run.gather(state)
    close(found, losses)
    close(updated.params, params)
    np.testing.assert_allclose(updated.gradient_norm, norms[-1], rtol=1e-5)
    assert norms[-1] > 0.6  # above the limit


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fields",
    ({}, {"options": dataclasses.replace(BUCKETS, topology="all_to_all")}),
    ids=("ring", "all_to_all"),
)
def test_it_sends_what_is_reported(data_mesh, fields):
    """And the norm, of 4 bytes, where gradients are clipped. Nothing runs under a loop."""
    run = Run(data_mesh(WORKERS), clip_norm=0.5, **fields)
    report = run.pipelined.wire_report(start(), WORKERS)

    def sent(function, *args):
        found = collectives(function.lower(*args).compile().as_text())
        assert not any(one.looped for one in found)
        return sum(one.sent_bytes(WORKERS) for one in found)

    state = run.begin()
    at_first = report.gathered_bytes + report.exact_bytes + NORM_BYTES
    assert sent(run.gather, state) == at_first
    whole = report.bytes_per_worker + 2 * NORM_BYTES  # the mean loss is as large
    assert sent(run.step, state, batches(1)[0]) == whole
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((state.shards, state.exact))) / WORKERS
    assert report.state_bytes == held
    assert report.buckets == len(LAYERS) == len(state.shards)


def test_an_update_waits_for_its_own_bucket_and_those_before_it(data_mesh):
    """It needs no gather of a bucket behind. Scatters are in the other order."""
    run = Run(
        data_mesh(WORKERS),
        method="bf16",
        options=dataclasses.replace(BUCKETS, topology="all_to_all"),
    )

    def count(function, *args):
        return len(collectives(jax.jit(function).lower(*args).compile().as_text()))

    state = run.begin()
    gathers = [
        count(lambda state, name=name: run.gather(state).params[name]["w"], state)
        for name in LAYERS
    ]
    assert gathers == [2, 3, 4]  # with the sum of the norm, which comes first
    specs = run.pipelined.state_specs

    def scatter(number, params, grads):
        updated = PipelinedUpdate(state.step, params, (), np.float32(0))
        return list(run.pipelined.scatter(grads, updated).shards.values())[number]

    grads = jax.tree.map(lambda leaf: np.stack([leaf] * WORKERS), start())
    scatters = [
        count(
            jax.shard_map(
                lambda params, grads, number=number: scatter(
                    number, params, jax.tree.map(lambda leaf: leaf[0], grads)
                ),
                mesh=data_mesh(WORKERS),
                in_specs=(P(), P("data")),
                out_specs=specs.shards,
            ),
            start(),
            grads,
        )
        for number in range(len(LAYERS))
    ]
    assert scatters == [3, 2, 1]


def test_nan_stays_in_its_bucket_unless_gradients_are_clipped(data_mesh, clipped):
    """NaN of one worker surfaces on all of them."""
    for run, everywhere in ((Run(data_mesh(WORKERS), method="bf16"), False), (clipped, True)):
        state, _ = run.train(run.begin(), batches(1))
        broken = jax.tree.map(np.array, state.shards)
        broken[sorted(broken)[1]][2, 5] = np.nan
        params = run.gather(state._replace(shards=broken)).params
        assert np.any(np.isnan(params["2"]["w"]))
        others = [params["1"]["w"], params["3"]["w"], params["2"]["b"]]
        assert all(np.all(np.isnan(leaf)) == everywhere for leaf in others)


def test_every_step_has_noise_of_its_own_in_both_halves():
    """The same in every call of a step."""
    pipelined = Pipelined(
        optimizer=optax.sgd(1.0), axis_name="data", method=dq.Compression(STOCHASTIC, "all_to_all")
    )
    size = 2048
    grads = np.random.default_rng(0).normal(size=(2, size)).astype(np.float32)

    def half(scattered, gathered):
        """Means after halves of the steps of some numbers."""

        def local(grads):
            start = pipelined.gather(pipelined.init({"w": jnp.zeros(size)}))
            state = pipelined.scatter({"w": grads}, start._replace(step=scattered))
            return pipelined.gather(state._replace(step=gathered + 1)).params["w"]

        return jax.vmap(local, axis_name="data")(grads)[0]

    run = jax.jit(half)
    first, again, scatter, gather = (
        run(*map(jnp.int32, n)) for n in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    np.testing.assert_array_equal(first, again)
    for other in (scatter, gather):
        assert 0.2 < np.mean(np.asarray(first != other)) < 1
        np.testing.assert_allclose(other, -grads.mean(0), rtol=0.05, atol=0.02)


def test_fast_links_carry_exact_parts(data_mesh):
    """Two hosts of two devices: the sums of ordinary training, a quarter of the bucket each."""
    mesh = jax.make_mesh(
        (2, 2), ("hosts", "local"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    run = Run(mesh, method="exact", clip_norm=0.3, optimizer=optax.sgd(0.5))
    xs = batches(3)
    losses, params, norms = oracle(xs, CLIPPED_SGD)
    state, found = run.train(run.begin(), xs)
    updated = run.gather(state)
    close(found, losses)
    close(updated.params, params)
    np.testing.assert_allclose(updated.gradient_norm, norms[-1], rtol=1e-5)
    lossy = Run(mesh, method=STOCHASTIC)
    sent = sent_by_axes(lossy.gather.lower(lossy.begin()).compile().as_text(), mesh)
    report = lossy.pipelined.wire_report(start(), (2, 2))
    assert sent[("hosts",)] == report.gathered_bytes


def test_shards_of_a_model_travel_alone(data_mesh):
    """Over data 2 x fsdp 4: the parameters and the norm of a run without shards, a quarter of its
    bytes."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    params = {"a": start()["1"]["w"], "b": start()["1"]["b"], "c": start()["2"]["w"]}
    split = {"a": P(None, "fsdp"), "b": P("fsdp"), "c": P()}
    grads = jax.tree.map(lambda leaf: np.stack([leaf + 1, 3 * leaf]), params)

    def run(mesh, specs):
        pipelined = Pipelined(
            optimizer=optax.sgd(0.5),
            axis_name="data",
            method=dq.Compression("exact", specs=specs, exact_below=100),
            clip_norm=0.3,
        )

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
        )
        def step(params, grads):
            updated = pipelined.gather(pipelined.init(params))
            state = pipelined.scatter(jax.tree.map(lambda leaf: leaf[0], grads), updated)
            return pipelined.gather(state)

        if specs is None:
            return pipelined, step, (params, grads)
        place = functools.partial(
            jax.tree.map, lambda spec, leaf: jax.device_put(leaf, NamedSharding(mesh, spec))
        )
        stacked = {name: P("data", *spec) for name, spec in specs.items()}
        return pipelined, step, (place(specs, params), place(stacked, grads))

    _, plain, args = run(data_mesh(2), None)
    pipelined, sharded, sharded_args = run(mesh, split)
    plain_pipelined = dataclasses.replace(
        pipelined, method=dataclasses.replace(pipelined.method, specs=None)
    )
    expected, found = plain(*args), sharded(*sharded_args)
    close(found, expected)
    np.testing.assert_allclose(found.gradient_norm, expected.gradient_norm, rtol=1e-5)
    mean = jax.tree.map(lambda leaf: leaf.mean(0), grads)
    np.testing.assert_allclose(found.gradient_norm, global_norm(mean), rtol=1e-5)
    report = pipelined.wire_report(params, "data", mesh=mesh)
    whole = plain_pipelined.wire_report({"a": params["a"]}, 2)
    small = plain_pipelined.wire_report({"c": params["c"]}, 2)
    least = whole.scattered_bytes / 4 + small.scattered_bytes
    assert least <= report.scattered_bytes < least + 4096  # shards are padded


def test_gradients_of_16_bits_are_clipped_in_32():
    pipelined = Pipelined(optimizer=optax.sgd(1.0), axis_name="data", method="exact", clip_norm=1.0)

    def step(grads):
        updated = pipelined.gather(pipelined.init({"w": jnp.zeros(2048, jnp.bfloat16)}))
        return pipelined.gather(pipelined.scatter({"w": grads}, updated)).params["w"]

    grads = jnp.full((2, 2048), 3, jnp.bfloat16)
    found = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    assert (found == jnp.bfloat16(-(2048**-0.5))).all()


def test_small_gradients_are_not_scaled_up():
    pipelined = Pipelined(optimizer=optax.sgd(1.0), axis_name="data", method="exact", clip_norm=1e6)

    def step(grads):
        updated = pipelined.gather(pipelined.init({"w": jnp.zeros(2048)}))
        return pipelined.gather(pipelined.scatter({"w": grads}, updated)).params["w"]

    found = jax.jit(jax.vmap(step, axis_name="data"))(jnp.ones((2, 2048)))
    np.testing.assert_allclose(found, -1.0, rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", (1, 2, 3))
@pytest.mark.parametrize("size", (1024, 1500))
def test_any_size_on_any_number_of_workers(workers, size):
    """Simulated; sizes that do not divide are padded, and padding is in no norm."""
    pipelined = Pipelined(optimizer=optax.sgd(1.0), axis_name="data", method="exact:ring")
    grads = np.random.default_rng(size).normal(size=(workers, size)).astype(np.float32)

    def step(grads):
        updated = pipelined.gather(pipelined.init({"w": jnp.zeros(size)}))
        return pipelined.gather(pipelined.scatter({"w": grads}, updated))

    updated = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    np.testing.assert_allclose(-updated.params["w"], [grads.mean(0)] * workers, atol=1e-6)
    norm = np.linalg.norm(grads.mean(0))
    np.testing.assert_allclose(updated.gradient_norm, [norm] * workers, rtol=1e-5)


def test_noise_of_padding_is_in_no_norm():
    """A method that turns padding into something else."""
    pipelined = Pipelined(optimizer=optax.sgd(1.0), axis_name="data", method=dynamiq_research.THC())
    size, key = 1500, jax.random.key(0)
    grads = jax.random.normal(key, (2, size))

    def step(grads):
        updated = pipelined.gather(pipelined.init({"w": jnp.zeros(size)}))
        return pipelined.scatter({"w": grads}, updated)

    state = jax.jit(jax.vmap(step, axis_name="data"))(grads)
    (shards,) = state.shards.values()
    # Where padding is dealt to, and only there.
    places = ShiftedDealing(size, 2, 256).places(jnp.arange(2, dtype=jnp.int32))
    is_padding = np.asarray(places).reshape(shards.shape) >= size
    assert np.sum(is_padding) > 0 and np.all(np.asarray(shards)[is_padding] == 0)
    assert np.mean(np.asarray(shards)[~is_padding] != 0) > 0.9


@pytest.mark.parametrize(
    "fields, error, words",
    (
        ({"method": "ef+dynamiq"}, ValueError, "cannot be used in dynamiq_research.Pipelined"),
        ({"method": "nothing"}, ValueError, "nothing"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm=-1.0"),
        ({"optimizer": 0.1}, TypeError, "optimizer=0.1 is not an optax transformation"),
    ),
)
def test_impossible_fields_are_refused(fields, error, words):
    with pytest.raises(error, match=re.escape(words)):
        Pipelined(**({"optimizer": ADAMW, "axis_name": "data"} | fields))


def test_halves_in_another_order_are_refused(clipped, data_mesh):
    """Gradients that are pending would be lost."""
    pipelined = clipped.pipelined
    state = jax.eval_shape(clipped.init, start())
    with pytest.raises(TypeError, match="updated is a PipelinedState, not a PipelinedUpdate"):
        pipelined.scatter(start(), state)
    with pytest.raises(TypeError, match="updated is a PipelinedState, not a PipelinedUpdate"):
        pipelined.resume(state)
    with pytest.raises(TypeError, match="state is a PipelinedUpdate, not a PipelinedState"):
        pipelined.gather(jax.eval_shape(clipped.gather, state))

    def scatter(grads, pcast=True):
        def local(params):
            updated = PipelinedUpdate(jnp.int32(0), params, (), jnp.float32(0))
            own = lax.pcast(grads(params), "data", to="varying") if pcast else grads(params)
            return pipelined.scatter(own, updated).shards

        specs = pipelined.state_specs.shards
        jax.eval_shape(
            jax.shard_map(local, mesh=data_mesh(WORKERS), in_specs=P(), out_specs=specs), start()
        )

    scatter(lambda params: params)
    with pytest.raises(ValueError, match=r"not like the parameters: .*bfloat16"):
        scatter(lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    with pytest.raises(ValueError, match=r"not like the parameters: .*'3'"):
        scatter(lambda params: {"1": params["1"], "2": params["2"]})
    with pytest.raises(ValueError, match="summed"):
        scatter(lambda params: params, pcast=False)


def test_a_state_of_other_buckets_is_refused(clipped, data_mesh):
    other = Run(data_mesh(WORKERS), options=dq.Compression())
    with pytest.raises(ValueError, match=r"'shard-.*need 'shard-.*: the leaves differ.*to resume"):
        jax.eval_shape(other.gather, clipped.begin())
    whole = jax.shard_map(
        clipped.pipelined.gather, mesh=data_mesh(WORKERS), in_specs=(P(),), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"whose first axis is not one worker.*state_specs"):
        jax.eval_shape(whole, clipped.begin())


def test_shards_of_other_leaves_of_the_same_shapes_are_refused():
    """They are of the same methods, sizes and number of workers."""
    one, other = (
        Pipelined(optimizer=optax.sgd(1.0), axis_name="data", method={leaves: "bf16", "": "mxfp8"})
        for leaves in ("[12]/w", "[13]/w")
    )
    simulated = jax.vmap(
        lambda params: other.gather(one.init(params)), in_axes=None, axis_name="data", axis_size=2
    )
    words = "state.shards has 'shard-1_w_2_w-.*: the leaves differ"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(simulated, start())
