"""Runs of the fine-tuning example: they learn, resume bit-identically, and refuse other options."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples import finetune_llm
from examples.llm import run
from examples.llm.run import read_records
from examples.tests.support import llm_files
from examples.tests.support.llm_files import last_state, losses
from examples.tools import budget, digests
from tests.support import processes

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 8
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def command(files):
    """`command(output)`: run the command in this process, two workers of two devices each.

    Its step is compiled once.
    """
    steps, compile_step = [], run.compiled_step

    def compiled_step(*arguments):
        steps.append(steps[0] if steps else compile_step(*arguments))
        return steps[0]

    def main(output, **more):
        options = {
            "checkpoint": files / "start",
            "data": files / "chats.jsonl",
            "output_dir": output,
            "method": "ef+mxfp4",
            "context": 64,
            "fsdp": 2,
            "steps": STEPS,
            "learning_rate": 1e-2,
            "save_every": 3,
        }
        # The fixture of a module comes before that of each test.
        with jax.numpy_dtype_promotion("standard"):
            finetune_llm.main(finetune_llm.Options(**options | more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "compiled_step", compiled_step)
        patch.setattr(run, "EVALUATE_EVERY", 4)
        patch.setattr(finetune_llm, "make_mesh", lambda options: llm_files.mesh_of(2, 2))
        yield main


@pytest.fixture(scope="module")
def output(command, tmp_path_factory):
    """The output folder of a run of `STEPS` steps."""
    folder = tmp_path_factory.mktemp("output")
    command(folder)
    return folder


def assert_same_results(one, other, step) -> None:
    """Losses, weights and states of all devices are the same bit for bit."""
    assert losses(one) == losses(other)
    ours, theirs = ((o / "model/model.safetensors").read_bytes() for o in (one, other))
    assert ours == theirs
    jax.tree.map(np.testing.assert_array_equal, *(last_state(o, step) for o in (one, other)))


# -------------------------------------------------------------------------------------- one command


def test_the_command_learns_and_writes_a_checkpoint_that_it_can_read(files, output):
    records = losses(output)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert [r["step"] for r in records if "evaluation_loss" in r] == [0, 4, 8]
    assert records[-1]["evaluation_loss"] < 0.8 * records[0]["evaluation_loss"]
    assert records[-1]["error"] > 0.001 and records[-1]["bytes"] > 0
    folders = files / "start", output / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() == after.keys()
    assert all(np.any(before[name] != after[name]) for name in before)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (output / "model" / name).read_text() == (files / "start" / name).read_text()


def test_a_run_resumes_bit_identically_from_its_last_checkpoint(command, output, tmp_path):
    """With residuals that differ between devices. Step 8 is as if it was never saved."""
    interrupted = tmp_path / "output"
    shutil.copytree(output, interrupted)
    shutil.rmtree(interrupted / "checkpoints" / str(STEPS))
    shutil.rmtree(interrupted / "model")
    lines = (output / "metrics.jsonl").read_text().splitlines()
    (interrupted / "metrics.jsonl").write_text("\n".join([*lines[:8], '{"st']))
    command(interrupted)
    # Steps before the checkpoint are not taken again: even their times are the same.
    assert (interrupted / "metrics.jsonl").read_text().splitlines()[:7] == lines[:7]
    assert_same_results(interrupted, output, STEPS)


@pytest.mark.parametrize(
    ("change", "mesh", "words"),
    (
        ({"method": "bf16"}, (2, 2), r"method 'ef\+mxfp4', now 'bf16'"),
        ({"context": 32}, (2, 2), r"data '\w+', now '\w+', held_out '\w+', now '\w+'\."),
        ({"seed": 1}, (2, 2), r"seed 0, now 1\."),
        ({}, (4,), r"workers 2, now 4, fsdp 2, now 1\."),  # with residuals of other shapes
    ),
)
def test_another_run_is_not_resumed(command, output, change, mesh, words, monkeypatch):
    monkeypatch.setattr(finetune_llm, "make_mesh", lambda options: llm_files.mesh_of(*mesh))
    with pytest.raises(SystemExit, match=rf"^finetune_llm: The run in .* started with {words}"):
        command(output, **change)


def test_digests_see_both_ends_of_a_file(tmp_path):
    """A weight file may be too large to read whole."""
    path, content = tmp_path / "weights", bytearray(3 * digests.AT_ENDS)

    def after(position):
        changed = content.copy()
        changed[position] = 1
        path.write_bytes(changed)
        return digests.of_files([path])

    path.write_bytes(content)
    whole = digests.of_files([path])
    assert len({whole, after(0), after(-1)}) == 3
    for size in (0, 1, digests.AT_ENDS + 1):  # ends that overlap
        path.write_bytes(content[:size])
        assert digests.of_files([path]) != whole


@pytest.mark.parametrize(
    ("content", "words"),
    (
        ("{", r"run\.json is broken JSON: .* Give the same options"),
        ("[]", r"run\.json has a list, not a JSON object"),
        (None, r"run\.json is missing"),
        ("{}", "was started with method None"),
    ),
)
def test_a_run_whose_facts_cannot_be_read_is_refused(command, output, content, words, tmp_path):
    copy = tmp_path / "output"
    shutil.copytree(output, copy)
    (copy / "run.json").unlink()
    if content is not None:
        (copy / "run.json").write_text(content)
    with pytest.raises(SystemExit, match=words):
        command(copy)


def test_a_run_that_does_not_fit_the_disk_or_the_memory_makes_nothing(
    command, tmp_path, monkeypatch
):
    free = SimpleNamespace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(SystemExit, match=r"/output will take 0.0 GiB, and its disk has"):
        command(tmp_path / "output")
    monkeypatch.undo()
    monkeypatch.setattr(budget, "free_memory", lambda: budget.REST_OF_PROCESS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "compiled_step", None)  # The state alone is too much.
        with pytest.raises(SystemExit, match=r"--workers 2 needs 2.5 .* this machine has 2.5 GiB"):
            command(tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_model_is_not_written_over_the_one_it_came_from(files, command):
    with pytest.raises(SystemExit, match=r"--checkpoint is .*/model, which --output-dir"):
        command(files, checkpoint=files / "model")


def test_files_that_do_not_belong_together_are_refused(files, command, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(files / "start", start)
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"vocab_size": 60}))
    with pytest.raises(SystemExit, match=r"gives token \d+, but its config\.json has a vocabulary"):
        command(tmp_path / "output", checkpoint=start)
    with pytest.raises(SystemExit, match=r"--context is 4096, but the model was made for at most"):
        command(tmp_path / "output", context=4096)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"steps": 0}, r"--steps is 0\. Give a number above 0"),
        ({"fsdp": 2, "batch": 3}, r"--batch is 3\. Give a multiple of --fsdp, which is 2"),
        ({"checkpoint": pathlib.Path("a")}, r"--data is None\. Give --checkpoint and --data"),
        ({"processes": ("a:1", 2, 0)}, r"--processes is .* Give --checkpoint and --data too"),
        ({"seed": -1}, r"--seed is -1\. Give 0 or more"),
    ),
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        finetune_llm.Options(**options)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"method": "dynamic"}, "method='dynamic' is not known"),
        ({"topology": "star"}, "topology='star'"),
        ({"checkpoint": pathlib.Path("none")}, r"none/config\.json is missing"),
        ({"data": pathlib.Path("none")}, "--data is none: there is no such file"),
    ),
)
def test_wrong_names_are_refused_in_one_line(command, change, words, tmp_path):
    with pytest.raises(SystemExit, match=f"^finetune_llm: {words}"):
        command(tmp_path, **change)


# --------------------------------------------------------------------------- processes of their own


def started(*words, **environment: str) -> subprocess.Popen:
    """Start the command."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "examples.finetune_llm", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def begin(files, output, *more) -> subprocess.Popen:
    """Start a run of two workers."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(files / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Most of the time is that of the compiler.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    options = {
        "checkpoint": files / "start",
        "data": files / "chats.jsonl",
        "output-dir": output,
        "workers": 2,
        "steps": 6,
        "context": 64,
        "learning-rate": 1e-2,
        "save-every": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return started(*words, *more, **environment)


def end(process: subprocess.Popen, timeout: float = processes.TIMEOUT) -> str:
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


@slow
@pytest.mark.parametrize("method", ["ef+mxfp4", "dynamiq:5"])
def test_killed_and_started_again_a_run_ends_with_the_bits_of_two_processes(
    method, files, tmp_path
):
    """Nobody interrupts the two processes, which have one of its two devices each. The first method
    has states of each worker, and the second one is in the plain step.
    """
    together, killed = tmp_path / "together", tmp_path / "killed"
    joined = ("--processes", f"127.0.0.1:{processes.free_port()}", 2)
    running = [begin(files, together, "--method", method, *joined, rank) for rank in range(2)]
    try:
        texts = [end(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert "held-out loss" in texts[0] and "held-out loss" not in texts[1]

    process = begin(files, killed, "--method", method)
    try:
        # Records come before checkpoints: this may be before, in or after that of the third step.
        deadline = time.monotonic() + processes.TIMEOUT
        while len(read_records(killed / "metrics.jsonl")) <= 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = max(int(p.name) for p in (killed / "checkpoints").iterdir() if p.name.isdigit())
    before = (killed / "metrics.jsonl").read_text().splitlines()[: saved + 1]
    assert 0 < saved < 6

    end(begin(files, killed, "--method", method))
    # Steps before the checkpoint are not taken again: even their times are the same.
    assert (killed / "metrics.jsonl").read_text().splitlines()[: saved + 1] == before
    assert_same_results(killed, together, 6)


@slow
def test_without_a_checkpoint_it_makes_one_and_compares(tmp_path):
    short = ("--steps", 1, "--workers", 2, "--context", 32, "--output-dir", tmp_path)
    # Two runs are compiled and evaluated, which takes two minutes on a free machine.
    text = end(started(*short), 4 * processes.TIMEOUT)
    for name in ("before", "exact | dynamiq:5:ring |", "bytes sent a step"):
        assert name in text
    assert "compression only takes time" in " ".join(text.split())
    assert (tmp_path / "report.md").read_text() in text
    for file in ("model/model.safetensors", "losses.png"):
        assert (tmp_path / file).stat().st_size > 0
    exact, compressed = losses(tmp_path / "exact"), losses(tmp_path)
    assert exact[0] == compressed[0] and exact[1]["loss"] == compressed[1]["loss"]
    assert exact[1]["evaluation_loss"] != compressed[1]["evaluation_loss"]
    assert "error" not in compressed[1]
    assert compressed[1]["bytes"] < 0.2 * exact[1]["bytes"]


@pytest.mark.parametrize(("options", "is_exact"), (({}, False), ({"method": "exact"}, True)))
def test_one_worker_is_for_exact_runs(options, is_exact, monkeypatch):
    monkeypatch.setattr(finetune_llm, "make_mesh", lambda options: llm_files.mesh_of(1))
    monkeypatch.setattr(finetune_llm, "with_demo", lambda options: 1 / 0)
    error = ZeroDivisionError if is_exact else ValueError
    with pytest.raises(error, match="division" if is_exact else r"^--workers is 1"):
        finetune_llm.finetune(finetune_llm.Options(**options))


def test_the_demonstration_keeps_the_options_that_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr(finetune_llm.small_decoder, "prepare", lambda folder: None)
    given = finetune_llm.Options(context=256, learning_rate=1e-4, output_dir=tmp_path)
    for options, expected in ((given, (256, 1e-4)), (finetune_llm.Options(), (128, 6e-3))):
        demo = finetune_llm.with_demo(options)
        assert (demo.context, demo.learning_rate) == expected
