"""The mean gradient of the fine-tuning example, over a mesh of workers and their parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dynamiq_jax._workshop.settings import parse_setting
from examples.llm.reduction import OVER_DATA, reduction, wire_report
from tests.support.gradients import of_workers, vnmse

# No axis of the second divides: it is whole on every device. The last one is too small to cut.
SHAPES = {"even": (64, 96), "odd": (65, 63), "small": (5,)}


def gradients() -> dict[str, np.ndarray]:
    """[2, *shape] for every leaf."""
    return {
        name: of_workers(seed, 2, int(np.prod(shape))).reshape(2, *shape)
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def mesh_of(fsdp: int) -> jax.sharding.Mesh:
    axes = (AxisType.Auto,) * 2
    devices = jax.devices()[: 2 * fsdp]
    return jax.make_mesh((2, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)


@pytest.mark.parametrize(
    ("method", "fsdp", "largest_error"),
    (
        ("psum", 2, 1e-12),
        ("dynamiq:5", 2, 0.05),
        ("ef+powersgd", 2, 1.0),
        ("ef+topk_chunked:4", 1, 1.0),
        pytest.param("omnireduce", 2, 1.0, marks=pytest.mark.slow),
    ),
)
def test_every_replica_has_the_same_bits_of_a_mean(method, fsdp, largest_error):
    mesh = mesh_of(fsdp)
    reduce = reduction(parse_setting(method), mesh, seed=0)

    def local(stacked, state, measure):
        own = jax.tree.map(lambda leaf: leaf[0], stacked)
        return reduce.update(own, state, measure=measure)

    over_data = {"mesh": mesh, "axis_names": {"data"}}
    init = jax.shard_map(reduce.init, in_specs=P(), out_specs=OVER_DATA, **over_data)
    step = jax.jit(
        jax.shard_map(
            local,
            in_specs=(P("data"), OVER_DATA, P()),
            out_specs=(P(), OVER_DATA),
            **over_data,
        )
    )
    with jax.numpy_dtype_promotion("standard"):  # the norm of optax
        state = jax.jit(init)({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
        _, state = step(gradients(), state, np.bool_(False))
        assert np.isnan(state.vnmse)
        mean, state = step(gradients(), state, np.bool_(True))
    exact = {name: leaf.mean(axis=0) for name, leaf in gradients().items()}
    np.testing.assert_allclose(mean["small"], exact["small"], rtol=1e-5)
    flat, truth = (np.concatenate([np.ravel(t[n]) for n in SHAPES]) for t in (mean, exact))
    assert float(state.vnmse) == pytest.approx(vnmse(flat, truth), rel=1e-3, abs=1e-12)
    assert state.vnmse <= largest_error and (state.vnmse > 1e-6 or method == "psum")
    assert float(state.norm) == pytest.approx(np.linalg.norm(flat), rel=1e-4)
    for leaf in mean.values():
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert [len(bits) for bits in copies.values()] == [1] * len(copies)
    assert len({str(shard.index) for shard in mean["even"].addressable_shards}) == fsdp


def test_each_device_sends_its_part_only():
    shapes = {"w": jax.ShapeDtypeStruct((4096, 512), jnp.float32)}
    setting = parse_setting("dynamiq:5")
    whole, half = (wire_report(setting, shapes, mesh_of(n)).bytes_per_worker for n in (1, 2))
    assert half == pytest.approx(whole / 2, rel=0.01)
    exact = wire_report(parse_setting("psum"), shapes, mesh_of(1))
    assert exact.bytes_per_worker == 4 * 4096 * 512  # twice half of them, in float32
