"""What compilers for GPUs and TPUs are given, and where kernels are chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.topologies import Ring
from pallas_kernels import choice, modes, operations
from pallas_kernels.codec import LocalRows, Places
from pallas_kernels.modes import without_gpu
from pallas_kernels.registry import BACKENDS
from tests.support.kernel_cases import small_layout

slow = pytest.mark.slow
ALL_WIDTHS = {"widths": tuple(range(2, 17)), "bits": 9}
# Platform, default backend of a process with such devices, kind of device, and calls in programs.
TARGETS = {
    "triton": ("cuda", "gpu", "NVIDIA H200", "custom_call @__gpu$xla.gpu.triton"),
    "mosaic_gpu": ("cuda", "gpu", "NVIDIA H200", "custom_call @mosaic_gpu"),
    "mosaic_tpu": ("tpu", "tpu", "TPU v5 lite", "@tpu_custom_call"),
}


def target(name):
    """Context that tells newer versions of JAX which device to lower for."""
    _, platform, kind, _ = TARGETS[name]
    if not hasattr(jax.sharding, "AbstractDevice"):
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    cores = 1 if platform == "tpu" else None
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def shapes_of(layout, dtype="float32") -> LocalRows:
    shape = jax.ShapeDtypeStruct
    of_places = shape((layout.num_chunks, layout.rows_per_chunk), "int32")
    places = Places(of_places, of_places, shape((layout.num_chunks, 17), "int32"))
    return LocalRows(shape((layout.num_rows, 256), dtype), places, shape((2,), "uint32"))


def all_operations(layout, implementation: str | None, local: LocalRows):
    """Run every operation once, each of which is one kernel."""
    run = operations.by(implementation)
    sent = operations.compress(local, 1, 0, layout=layout, implementation=implementation)
    sent = run.hop(sent[None], local, 1, 1, layout=layout)
    received = jnp.stack([sent, sent])
    decoded = run.decompress(received, local.places, layout=layout)
    added = run.decompress_accumulate(received, local, 1, layout=layout)
    return sent, decoded, added, run.statistics(local.rows)


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "changes"),
    [
        *(
            ("mosaic_gpu", rows, "float32", {**ALL_WIDTHS, "group_size": size})
            for rows in (1, 40)
            for size in (8, 16, 32)
        ),
        *(
            pytest.param(name, 1000, *each, marks=slow)
            for name in ("triton", "mosaic_tpu")
            for each in (
                ("bfloat16", {**ALL_WIDTHS, "spacing": "geometric"}),
                ("float16", {"group_size": 8, "rounding": "independent", "gap_ratio": 1}),
            )
        ),
    ],
)
def test_all_operations_lower(name, rows, dtype, changes):
    layout = small_layout(rows, **changes)
    platform, _, _, call = TARGETS[name]
    with without_gpu("compile"), target(name):
        if reason := BACKENDS[name].why_not_here():
            pytest.skip(reason)
        function = functools.partial(all_operations, layout, name)
        traced = jax.jit(function).trace(shapes_of(layout, dtype))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count(call) == 5


@pytest.mark.parametrize(
    ("name", "changes"), [("triton", ALL_WIDTHS), ("mosaic_tpu", {})], ids=["triton", "mosaic_tpu"]
)
def test_kernels_are_the_default_on_their_platform_and_nowhere_else(name, changes, monkeypatch):
    """From one trace."""
    layout = small_layout(1000, **changes)
    function = functools.partial(all_operations, layout, None)
    local = shapes_of(layout)
    assert jax.eval_shape(function, local)[0].dtype == jnp.uint8
    platform, backend, _, call = TARGETS[name]
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with without_gpu("compile"), target(name):
        traced = jax.jit(function).trace(local)
        for lowered_for, kernels in ((platform, 5), ("cpu", 0)):
            text = traced.lower(lowering_platforms=(lowered_for,)).as_text()
            assert text.count(call) == kernels
    assert modes.interpreting() is False


def mean_in_a_scan(implementation, topology, steps, key, gradient):
    """Return the mean of the gradients of a few steps, each compressed."""

    def step(total, number):
        with without_gpu("compile"):
            ours = dq.Compression(dq.DynamiQ(implementation=implementation), topology)
            step_key = jax.random.fold_in(key, number)
            mean = dq.pmean(gradient[0], "data", key=step_key, method=ours)
        return total + mean / steps, None

    total = jnp.zeros(gradient.shape[1:], gradient.dtype)
    return jax.lax.scan(step, total, jnp.arange(steps))[0]


@pytest.mark.parametrize(
    ("name", "topology", "kernels", "check_vma", "axis_type"),
    [
        # Norms, the first hop, the one in the loop, and the decoding; on a TPU also the widths.
        ("triton", Ring(), 4, True, AxisType.Auto),
        ("mosaic_tpu", "ring", 5, True, AxisType.Explicit),
        pytest.param("mosaic_tpu", "ring", 5, False, AxisType.Auto, marks=slow),
        # An all-to-all has a sum, and on both sides the energies and the widths of its rows.
        pytest.param("mosaic_tpu", "all_to_all", 10, True, AxisType.Auto, marks=slow),
    ],
)
def test_kernels_are_all_that_touches_rows(name, topology, kernels, check_vma, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    mapped = jax.shard_map(
        functools.partial(mean_in_a_scan, name, topology, 3),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    split = NamedSharding(mesh, P("data"))
    gradient = jax.ShapeDtypeStruct((8, 1 << 16), jnp.float32, sharding=split)
    traced = jax.jit(mapped).trace(jax.random.key(0), gradient)
    assert str(traced.jaxpr).count("pallas_call[") == kernels


def test_arrays_beyond_32_bit_indices_are_left_to_the_base(monkeypatch):
    """Kernels count elements in int32, which 2^31 of them overflow."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # whose kernels are traced at once
    with without_gpu("compile"):
        for rows, by_kernel in ((2**23 - 1, True), (2**23, False)):
            shape = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
            traced = jax.jit(operations.by().statistics).trace(shape)
            assert ("pallas_call[" in str(traced.jaxpr)) == by_kernel
        message = r"'triton' cannot run this: .* 2,147,483,648 elements"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(operations.by("triton").statistics, shape)


def test_messages_that_vector_memory_cannot_hold_are_left_to_the_base(monkeypatch):
    layout = small_layout(1 << 19)
    local = shapes_of(layout, "bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with without_gpu("compile"):
        hop = functools.partial(operations.compress, chunk=0, turn=0, layout=layout)
        assert "vmem_limit_bytes" not in str(jax.make_jaxpr(hop)(local))
        with pytest.raises(ValueError, match=r"1 messages of [\d,]+ bytes are more than"):
            jax.eval_shape(functools.partial(hop, implementation="mosaic_tpu"), local)


# ------------------------------------------------------------------------------ choice of a backend


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as far as the choice of a backend looks at it."""

    platform: str
    compute_capability: str = ""
    device_kind: str = ""


@pytest.fixture
def devices(monkeypatch):
    """`devices(*them)`: pretend that this machine has these devices."""

    def pretend(*them: Device) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: them[0].platform)
        monkeypatch.setattr(jax, "local_devices", lambda: list(them))

    return pretend


def test_a_backend_that_cannot_run_is_refused_with_the_reason(devices):
    reason = r"implementation='triton' cannot run here: the default devices are not GPUs"
    with pytest.raises(ValueError, match=reason):
        dq.DynamiQ(implementation="triton")
    with without_gpu("compile"):
        dq.DynamiQ(implementation="triton")
    with pytest.raises(ValueError, match=reason):  # not beyond the context
        dq.DynamiQ(implementation="triton")
    with pytest.raises(ValueError, match="GPU"):
        choice.check("mosaic_gpu")
    with pytest.raises(ValueError, match="the default devices are not TPUs"):
        operations.by("mosaic_tpu").statistics(jnp.zeros((1, 256)))
    with pytest.raises(ValueError, match="implementation='cuda' is not a backend"):
        choice.check("cuda")
    for name in (None, "xla"):
        choice.check(name)


def test_all_gpus_have_to_be_new_enough(devices):
    devices(Device("gpu", "9.0"), Device("gpu", "8.0"), Device("cpu"))
    choice.check("triton")
    devices(Device("gpu", "9.0"), Device("gpu", "7.5"))
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0, and this GPU has 7\.5"):
        choice.check("triton")
    devices(Device("gpu", "gfx942"))  # of AMD
    with pytest.raises(ValueError, match=r"needs compute capability 8\.0"):
        choice.check("triton")


def test_all_tpus_have_to_be_known(devices):
    devices(Device("tpu", device_kind="TPU v5 lite"), Device("tpu", device_kind="TPU v3"))
    with pytest.raises(ValueError, match="v5e, v5p and v6e, and this is a 'TPU v3'"):
        choice.check("mosaic_tpu")
    assert choice.message_dtype(None) == np.uint8
    devices(Device("tpu", device_kind="TPU v6 lite"))
    choice.check("mosaic_tpu")
    assert choice.message_dtype(None) == np.uint32
