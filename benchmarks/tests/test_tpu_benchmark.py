"""The benchmark of the kernels on a TPU runs through, interpreted at tiny sizes."""

import json

import jax
import pytest

from benchmarks.harness.operations import STEPS, least_bytes, operation_of
from benchmarks.tpu import kernels as tpu_kernels
from benchmarks.tpu import speed
from dynamiq_jax.methods import DynamiQ
from pallas_kernels.registry import BACKENDS
from pallas_kernels.trial import CALLS

# Interpreted kernels for TPUs have the bits of the base where both are optimized.
pytestmark = pytest.mark.optimized


@pytest.mark.slow
def test_every_part_runs_without_a_tpu(tmp_path, monkeypatch):
    """On two of the devices, as kernels are interpreted for each worker."""
    make_mesh = tpu_kernels.make_mesh
    monkeypatch.setattr(tpu_kernels, "make_mesh", lambda devices: make_mesh(devices[:2]))
    output = tmp_path / "result.json"
    small = ["--small", "--interpret", "--dtypes", "bfloat16", "--cases", "two widths"]
    # The suite is stricter than JAX is for its users.
    with jax.numpy_dtype_promotion("standard"):
        status = tpu_kernels.main([*small, "--repeats", "1", "--output", str(output)])
    assert status == 0
    results = json.loads(output.read_text())["results"]
    assert results["timings"] == "meaningless"
    verdicts = {(c["backend"], c["operation"]): c["verdict"] for c in results["checks"]}
    for call, operation in CALLS.items():
        for name in ("mosaic_tpu", "triton"):
            is_derived = BACKENDS[name].derives(operation)
            assert verdicts[name, call] == ("absent" if is_derived else "same")
    timed = {(row["backend"], row["operation"]) for row in results["operations"]}
    assert {("xla", "hop"), ("triton", "hop")} <= timed
    assert [row["workers"] for row in results["all_reduce"]] == [2, 2, 2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("operation", STEPS)
def test_least_bytes_are_those_of_the_arrays(operation, dtype):
    """Beside the widths and levels of a codec, which are small."""
    layout = DynamiQ(bits=5.0).layout(2**14, num_chunks=1)
    arguments = speed._arguments(layout, dtype)[operation]
    program = operation_of(operation, "xla", layout)
    arrays = jax.tree.leaves((arguments, jax.eval_shape(program, *arguments)))
    moved = sum(array.size * array.dtype.itemsize for array in arrays)
    least = least_bytes(operation, layout, dtype) * 2**14
    assert 0.98 * moved < least <= moved
