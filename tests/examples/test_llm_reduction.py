"""The mean gradient of the fine-tuning example, over a mesh of workers and their parts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from examples.llm.averaging import Averaging
from examples.llm.reduction import OVER_DATA, reduction, wire_report
from tests.support.gradients import of_workers, vnmse

# No axis of "odd" divides, so that it is whole on each device. "small" is too small to cut.
SHAPES = {"even": (64, 96), "odd": (65, 63), "small": (5,)}


def gradients() -> dict[str, np.ndarray]:
    """[2, *shape] for each leaf."""
    return {
        name: of_workers(seed, 2, int(np.prod(shape))).reshape(2, *shape)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def mesh_of(fsdp: int) -> jax.sharding.Mesh:
    axes = (AxisType.Auto,) * 2
    devices = jax.devices()[: 2 * fsdp]
    return jax.make_mesh((2, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)


def init_and_update(averaging: Averaging, fsdp: int, seed: int = 0):
    """Functions of parameters, and of stacked gradients, a state and `measure`."""
    mesh = mesh_of(fsdp)
    reduce = reduction(averaging, mesh, seed)

    def local(stacked, state, measure):
        own = jax.tree.map(lambda leaf: leaf[0], stacked)
        return reduce.update(own, state, measure=measure)

    over_data = {"mesh": mesh, "axis_names": {"data"}}
    init = jax.shard_map(reduce.init, in_specs=P(), out_specs=OVER_DATA, **over_data)
    specs = {"in_specs": (P("data"), OVER_DATA, P()), "out_specs": (P(), OVER_DATA)}
    return jax.jit(init), jax.jit(jax.shard_map(local, **specs, **over_data))


def lowered(init, update) -> str:
    """The program of `update`, before it is compiled."""
    stacked = {name: jax.ShapeDtypeStruct((2, *s), "float32") for name, s in SHAPES.items()}
    params = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in SHAPES.items()}
    return update.lower(stacked, jax.eval_shape(init, params), np.bool_(False)).as_text()


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # the norm of optax
        yield


AXES = ("data", "fsdp")


@functools.cache
def two_steps(method: str, topology: str, fsdp: int):
    """Means and states of two steps; only the second is measured."""
    init, update = init_and_update(Averaging(method=method, topology=topology), fsdp)
    state = init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    first = update(gradients(), state, np.bool_(False))
    return first, update(gradients(), first[1], np.bool_(True))


@pytest.mark.parametrize(
    ("method", "topology", "fsdp", "errors"),
    (  # `errors`: about half and twice the vNMSE of these gradients
        ("psum", "ring", 2, (0, 1e-12)),
        ("dynamiq:5", "butterfly", 2, (1e-3, 5e-3)),
        ("ef+powersgd", "ring", 2, (0.5, 0.9)),
        ("ef+topk_chunked:4", "ring", 1, (0.05, 0.25)),
        ("omnireduce", "ring", 2, (0.03, 0.15)),
    ),
)
def test_every_replica_has_the_same_bits_of_a_mean(method, topology, fsdp, errors):
    (_, first), (mean, state) = two_steps(method, topology, fsdp)
    assert np.isnan(first.vnmse) and state.all_reduce.step == 2
    exact = {name: leaf.mean(axis=0) for name, leaf in gradients().items()}
    np.testing.assert_allclose(mean["small"], exact["small"], rtol=1e-5)
    flat, truth = (np.concatenate([np.ravel(t[n]) for n in SHAPES]) for t in (mean, exact))
    assert float(state.vnmse) == pytest.approx(vnmse(flat, truth), rel=1e-3, abs=1e-12)
    assert errors[0] <= state.vnmse <= errors[1]
    assert float(state.norm) == pytest.approx(np.linalg.norm(flat), rel=1e-4)
    for leaf in mean.values():
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert [len(bits) for bits in copies.values()] == [1] * len(copies)
    if method != "psum":  # of an exact mean, the compiler chooses
        assert len({str(shard.index) for shard in mean["even"].addressable_shards}) == fsdp


def test_compressed_means_have_metrics_and_exact_ones_have_none():
    _, (_, state) = two_steps("dynamiq:5", "butterfly", 2)
    metrics = state.all_reduce.metrics
    assert float(metrics["error"]) == pytest.approx(float(state.vnmse), rel=0.5)
    assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())
    _, (_, state) = two_steps("psum", "ring", 2)
    assert state.all_reduce.metrics == {}


def test_what_a_step_leaves_out_is_in_the_next_one():
    """Means and residuals of the workers add up to the gradients."""
    (first, _), (second, state) = two_steps("ef+topk_chunked:4", "ring", 1)
    (kept,) = state.all_reduce.method.values()
    residual = np.split(np.mean(kept.residual, axis=0), [first["even"].size])
    for name, left_out in zip(("even", "odd"), residual, strict=True):
        found = np.ravel(first[name] + second[name]) + left_out
        # What is left is the rounding of the sums to bfloat16, which no worker can know.
        assert vnmse(found, 2 * gradients()[name].mean(axis=0).ravel()) < 2e-5


def test_the_seed_chooses_the_rounding_noise():
    averaging = Averaging(method="blockint:4:rounding=stochastic")
    means = []
    for seed in (0, 1):
        init, update = init_and_update(averaging, 1, seed)
        stacked = {"odd": gradients()["odd"]}
        state = init({"odd": jnp.zeros(SHAPES["odd"])})
        means.append(update(stacked, state, np.bool_(False))[0]["odd"])
    assert np.mean(means[0] != means[1]) > 0.1


@pytest.mark.parametrize("method", ("bf16", "ef+bf16"))
def test_no_leaf_is_sent_between_the_devices_of_a_worker(method):
    """Only the scalars that norms and metrics are made of."""
    init, update = init_and_update(Averaging(method=method), 2)
    state = init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    found = dq.inspect(update, gradients(), state, np.bool_(False))
    sent = {axis: sum(row.bytes for row in found.rows if axis in row.over) for axis in AXES}
    assert sent["fsdp"] < 200 and sent["data"] > 2 * min(map(math.prod, SHAPES.values()))


def test_each_device_sends_its_part_only():
    shapes = {"w": jax.ShapeDtypeStruct((4096, 512), jnp.float32)}
    averaging = Averaging(method="dynamiq:5")
    whole, half = (wire_report(averaging, shapes, mesh_of(n)).bytes_per_worker for n in (1, 2))
    assert half == pytest.approx(whole / 2, rel=0.01)
    exact = wire_report(Averaging(method="psum"), shapes, mesh_of(1))
    assert exact.bytes_per_worker == 4 * 4096 * 512  # twice half of them, in float32


@pytest.mark.parametrize(
    ("topology", "operation"), (("ring", "collective_permute"), ("all_to_all", "all_to_all"))
)
def test_gradients_travel_on_the_topology(topology, operation):
    init, update = init_and_update(Averaging(method="bf16", topology=topology), 1)
    assert f"stablehlo.{operation}" in lowered(init, update)


def test_a_topology_that_does_not_fit_is_refused():
    axes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[:3]}
    three = jax.make_mesh((3, 1), ("data", "fsdp"), **axes)
    averaging = Averaging(method="bf16", topology="butterfly")
    with pytest.raises(ValueError, match="does not support an axis of 3"):
        wire_report(averaging, {"w": jax.ShapeDtypeStruct((4096,), jnp.float32)}, three)


# ------------------------------------------------------------------------------------------- names


def test_names_are_those_of_tables():
    assert Averaging(method="psum").name == "exact (psum)"
    assert Averaging(method="dynamiq:4", topology="butterfly").name == "dynamiq:4:butterfly"
    assert Averaging(method="ef+bf16").is_stateful
    assert not Averaging(method="bf16").is_stateful and not Averaging(method="psum").is_stateful


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"method": "dynamic"}, r"^--method: .*'dynamic' is not known.*Give psum for the exact"),
        ({"method": "ef+psum"}, r"^--method: .*'ef\+psum' is not known"),
        ({"method": "dynamiq:x"}, "^--method: .*'x' is not an option of dynamiq"),
        ({"method": "bf16", "topology": "mesh"}, "^--topology: .*'mesh' is not known"),
        ({"method": "psum", "topology": "butterfly"}, "^--topology is butterfly, but .*psum takes"),
        (
            {"method": "dynamiq:4:butterfly"},
            "--method is dynamiq:4:butterfly, which names a topology. Give --topology butterfly",
        ),
    ),
)
def test_unknown_names_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Averaging(**options)
