"""The benchmark of the GPU kernels runs through, interpreted at tiny sizes."""

import json

import jax
import numpy as np
import pytest

from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.harness.device_gradients import device_gradient
from dynamiq_jax._measurement.gradients import worker_gradient
from pallas_kernels.registry import BACKENDS

SECTIONS = (
    *("device", "correctness", "main", "prediction", "sweep"),
    *("all_reduce", "bits", "sizes", "profiler"),
)


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path):
    output = tmp_path / "result.json"
    arguments = ["--small", "--interpret", "--dtypes", "bfloat16", "--workers", "2"]
    # The suite is stricter than JAX is for its users.
    with jax.numpy_dtype_promotion("standard"):
        status = gpu_kernels.main([*arguments, "--output", str(output)])
    record = json.loads(output.read_text())
    errors = [section["errors"] for section in record["sections"].values() if section["errors"]]
    assert (status, errors) == (0, [])
    assert record["timings"].startswith("meaningless")
    missing = {name: BACKENDS[name].why_not_lowered() for name in ("triton", "mosaic_gpu")}
    assert record["environment"]["left_out"] == {n: why for n, why in missing.items() if why}
    sections = record["sections"]
    assert {name: each["status"] for name, each in sections.items()} == dict.fromkeys(
        SECTIONS, "ok"
    )
    rows = sections["main"]["results"]["rows"]
    timed = {(row["operation"], row["implementation"]) for row in rows}
    assert {("hop", name) for name in ("triton", "xla", "int8", "mxfp8")} <= timed
    all_reduce = sections["all_reduce"]["results"]
    assert all_reduce["triton"]["route"] == all_reduce["xla"]["route"] == "vmap"
    assert all_reduce["triton"]["replicas_are_equal"] and all_reduce["vnmse_apart"] <= 0.01


def test_a_machine_without_a_gpu_is_named_at_the_start(tmp_path):
    output = tmp_path / "result.json"
    says = (
        "^No kernel for GPUs can run here: triton: the default devices are not GPUs; mosaic_gpu: "
    )
    with pytest.raises(SystemExit, match=f"{says}.*Run on .*, or give --interpret"):
        gpu_kernels.main(["--small", "--output", str(output)])
    assert not output.exists()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_large_gradients_repeat_what_the_host_draws(dtype, monkeypatch):
    monkeypatch.setattr("benchmarks.harness.device_gradients._DRAWN", 512)
    drawn = worker_gradient(1, 512, 3).astype(dtype)
    made = np.asarray(device_gradient(1, 1300, 3, dtype))
    np.testing.assert_array_equal(made, np.concatenate([drawn, drawn, drawn[:276]]))
