"""The benchmark of the GPU kernels runs through, interpreted at tiny sizes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "gpu_kernels.py"
SECTIONS = (
    "device",
    "correctness",
    "main",
    "prediction",
    "sweep",
    "all_reduce",
    "bits",
    "sizes",
    "profiler",
)


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path):
    output = tmp_path / "result.json"
    arguments = ["--small", "--interpret", "--dtypes", "bfloat16", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=tmp_path,  # it finds its checkout by itself
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads(output.read_text())
    assert record["timings"].startswith("meaningless")
    assert {
        name: section["status"] for name, section in record["sections"].items()
    } == dict.fromkeys(SECTIONS, "ok")
    timed = {
        (r["operation"], r["implementation"]) for r in record["sections"]["main"]["results"]["rows"]
    }
    assert {("hop", name) for name in ("triton", "xla", "int8", "mxfp8")} <= timed
    all_reduce = record["sections"]["all_reduce"]["results"]
    assert all_reduce["triton"]["replicas_are_equal"] and all_reduce["vnmse_apart"] <= 0.01
