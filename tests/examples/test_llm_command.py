"""The fine-tuning command in processes of its own: killed, in two processes, as a demonstration."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from examples import finetune_llm
from examples.llm.metrics import read
from examples.llm.options import Options
from tests.support import llm_files, processes
from tests.support.llm_files import last_state, losses

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder


def command(files, *options) -> subprocess.Popen:
    """Starts the command. Runs of the same program compile it once."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(files / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Most of the time is that of the compiler.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    words = [sys.executable, "-W", "error", "-m", "examples.finetune_llm", *map(str, options)]
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begin(files, output, *more) -> subprocess.Popen:
    """Starts a run of two workers, each with a residual and factors of its own."""
    options = {
        "checkpoint": files / "start",
        "data": files / "chats.jsonl",
        "output-dir": output,
        "method": "ef+powersgd",
        "workers": 2,
        "steps": STEPS,
        "context": 64,
        "learning-rate": 1e-2,
        "evaluate-every": 3,
        "save-every": 1,
        "sample-vnmse": 3,
    }
    return command(files, *(word for k, v in options.items() for word in (f"--{k}", v)), *more)


def end(process: subprocess.Popen) -> str:
    try:
        output = process.communicate(timeout=processes.TIMEOUT)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


@pytest.fixture(scope="module")
def together(files):
    """The output folder of a run in two processes, and what each of them wrote to its console."""
    output = files / "together"
    joined = ("--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", 2)
    running = [begin(files, output, *joined, "--process-id", rank) for rank in range(2)]
    try:
        return output, [end(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()


@slow
def test_one_of_two_processes_reports(together):
    output, texts = together
    assert "perplexity" in texts[0] and "perplexity" not in texts[1]
    assert (output / "curves.png").exists()


@slow
def test_killed_and_started_again_a_run_ends_with_the_bits_of_two_processes(
    files, together, tmp_path
):
    """Nobody interrupts the two processes, which have one of its two devices each."""
    process = begin(files, tmp_path)
    try:
        # Records come before checkpoints: this may be before, in or after that of the third step.
        deadline = time.monotonic() + processes.TIMEOUT
        while len(read(tmp_path / "metrics.jsonl")) <= 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[: saved + 1]
    assert 0 < saved < STEPS

    end(begin(files, tmp_path))
    # Steps before the checkpoint are not taken again: even their times are the same.
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[: saved + 1] == before
    assert losses(tmp_path) == losses(together[0])
    ours, theirs = ((o / "model/model.safetensors").read_bytes() for o in (tmp_path, together[0]))
    assert ours == theirs
    ours, theirs = (last_state(output, STEPS) for output in (tmp_path, together[0]))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@slow
def test_without_arguments_it_makes_what_it_needs_and_compares(files, tmp_path):
    short = ("--pretrain-steps", 1, "--steps", 1, "--workers", 2)
    small = ("--context", 32, "--evaluation-rows", 8)
    text = end(command(files, *short, *small, "--output-dir", tmp_path))
    for name in ("before", "exact (psum)", "dynamiq:5:ring", "difference"):
        assert f" {name} " in text
    assert "compression only takes time" in " ".join(text.split()) and "10 Gbit/s" in text
    for name in ("curves.png", "model/model.safetensors"):
        assert (tmp_path / name).stat().st_size > 0
    summaries = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [round(run["bits"]) for run in summaries.values()] == [32, 5]
    exact, compressed = losses(tmp_path / "exact"), losses(tmp_path)
    assert exact[0] == compressed[0] and exact[1]["loss"] == compressed[1]["loss"]
    assert exact[1]["evaluation_loss"] != compressed[1]["evaluation_loss"]
    assert exact[1]["vnmse"] == 0 and 1e-4 < compressed[1]["vnmse"] < 0.05
    metrics = {name: value for name, value in compressed[1].items() if "compression/" in name}
    assert metrics["compression/bytes"] == compressed[1]["bytes_sent"]
    assert metrics["compression/error"] == pytest.approx(compressed[1]["vnmse"], rel=0.5)
    assert metrics["compression/width_max"] > metrics["compression/width_min"] > 0
    assert not [name for name in exact[1] if "compression" in name]


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"steps": 0}, r"--steps is 0\. Give at least 1"),
        ({"context": 0}, r"--context is 0\. Give at least 1"),
        ({"fsdp": 2, "batch": 3}, r"--batch is 3\. Give a multiple of --fsdp, which is 2"),
        ({"checkpoint": pathlib.Path("a")}, r"--data is None\. Give --checkpoint and --data"),
        ({"num_processes": 2}, "Give --coordinator, --num-processes and --process-id"),
        ({"evaluation_share": 1.0}, r"--evaluation-share is 1\.0"),
    ),
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Options(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"method": "dynamic"}, "--method: method='dynamic' is not known"),
        ({"checkpoint": pathlib.Path("none"), "data": pathlib.Path("none")}, "--checkpoint"),
    ),
)
def test_wrong_names_are_refused_in_one_line(options, words, monkeypatch):
    monkeypatch.setattr(finetune_llm, "make_mesh", lambda *_, **__: llm_files.mesh_of(2))
    with pytest.raises(SystemExit, match=f"^finetune_llm: {words}"):
        finetune_llm.main(Options(**options))
