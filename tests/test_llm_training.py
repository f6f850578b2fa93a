"""The fine-tuning example: one command from a checkpoint to another, that survives being killed."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file

import dynamiq_jax as dq
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.settings import parse_setting
from dynamiq_jax.methods import METHODS, resolve_method
from examples import finetune_llm
from examples.llm import report
from examples.llm.batches import rows_of_step
from examples.llm.export import written_dtype
from examples.llm.finetuning import Every, finetune
from examples.llm.metrics import Metrics, read
from examples.llm.packing import Rows
from examples.llm.snapshots import Snapshots, forget
from examples.llm.training import Recipe, loss_and_hits
from tests.support import llm_files, processes

SCRIPT = pathlib.Path(finetune_llm.__file__)
STEPS, WORKERS = 8, 2
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder


def arguments(files, output, method, *more) -> list[str]:
    options = {
        "checkpoint": files / "start",
        "data": files / "chats.jsonl",
        "output-dir": output,
        "method": method,
        "workers": WORKERS,
        "steps": STEPS,
        "context": 64,
        "learning-rate": 1e-2,
        "evaluate-every": 4,
        "save-every": 2,
        "sample-vnmse": 3,
    }
    return [text for k, v in options.items() for text in (f"--{k}", str(v))] + [*map(str, more)]


def begin(files, *own) -> subprocess.Popen:
    """Starts the command; runs of the same program compile it once."""
    return command(files, arguments(files, *own))


def command(files, options) -> subprocess.Popen:
    paths = (str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH"))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_COMPILATION_CACHE_DIR": str(files / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    words = [sys.executable, "-W", "error", str(SCRIPT), *options]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen) -> str:
    try:
        output = process.communicate(timeout=processes.TIMEOUT)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


def losses(output: pathlib.Path) -> list[dict]:
    """All that was recorded but times."""
    records = read(output / "metrics.jsonl")
    return [{k: v for k, v in r.items() if "second" not in k} for r in records]


def last_state(output: pathlib.Path):
    """All that the run ended with, of all workers: parameters, moments, a method's own state."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore((output / f"checkpoints/{STEPS}/default").resolve())


@pytest.fixture(scope="module")
def uninterrupted(files):
    """Runs the command once for every method; returns where its output is."""
    done = {}

    def run(method, *more):
        if method not in done:
            output = files / f"uninterrupted {len(done)}"
            text = end(begin(files, output, method, *more))
            assert "perplexity" in text and (output / "curves.png").exists()
            done[method] = output
        return done[method]

    return run


# -------------------------------------------------------------------------------------- the command


def test_the_command_learns_and_writes_a_checkpoint_that_it_can_read(files, uninterrupted):
    output = uninterrupted("dynamiq:5")
    records = losses(output)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert [r["step"] for r in records if "evaluation_loss" in r] == [0, 4, 8]
    assert [r["step"] for r in records if "vnmse" in r] == [1, 4, 7]
    assert all(1e-5 < r["vnmse"] < 0.05 for r in records if "vnmse" in r)
    for record in records[::4]:
        assert record["perplexity"] == pytest.approx(np.exp(record["evaluation_loss"]))
    assert records[-1]["evaluation_loss"] < 0.8 * records[0]["evaluation_loss"]
    assert records[-1]["accuracy"] > records[0]["accuracy"]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (files / "start", output / "model")
    )
    assert before.keys() == after.keys()
    assert all(np.any(before[name] != after[name]) for name in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (output / "model" / name).read_text() == (files / "start" / name).read_text()


@slow
def test_without_arguments_it_makes_what_it_needs_and_compares(files, tmp_path):
    short = ("--pretrain-steps", 1, "--steps", 1, "--workers", 2, "--method", "bf16")
    options = [*map(str, short), "--output-dir", str(tmp_path)]
    text = end(command(files, options))
    assert all(f" {name} " in text for name in ("before", "exact (psum)", "bf16", "difference"))
    for name in ("curves.png", "model/model.safetensors"):
        assert (tmp_path / name).stat().st_size > 0
    summaries = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [run["bits"] for run in summaries.values()] == [32, 16]
    exact, compressed = losses(tmp_path / "exact"), losses(tmp_path)
    assert exact[0] == compressed[0] and exact[1]["loss"] == compressed[1]["loss"]
    assert exact[1]["evaluation_loss"] != compressed[1]["evaluation_loss"]


# Each carries another state: a residual, a basis of each matrix, what did not fit.
STATEFUL = [name for name in METHODS if resolve_method(name).is_stateful] + ["ef+topk_chunked"]


@pytest.mark.parametrize(
    ("method", "more", "killed_after"),
    (
        pytest.param("dynamiq:5", (), 3, id="dynamiq"),  # its rounding noise has a place to go on
        # Residuals and factors, other ones on each of four devices; in the middle of a checkpoint.
        pytest.param(
            "ef+powersgd",
            ("--fsdp", 2, "--accumulate", 2, "--dtype", "bfloat16", "--remat", "--save-every", 1),
            5,
            id="feedback and factors",
            marks=slow,
        ),
        *(pytest.param(name, (), 3, id=name, marks=slow) for name in STATEFUL),
    ),
)
def test_killed_and_started_again_it_ends_with_the_same_bits(
    method, more, killed_after, files, uninterrupted, tmp_path
):
    process = begin(files, tmp_path, method, *more)
    try:
        # Records come before checkpoints: this may be before, in or after the one of that step.
        deadline = time.monotonic() + processes.TIMEOUT
        while len(read(tmp_path / "metrics.jsonl")) <= killed_after:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    saved = max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[: saved + 1]
    assert 0 < saved < STEPS

    end(begin(files, tmp_path, method, *more))
    expected = uninterrupted(method, *more)
    assert losses(tmp_path) == losses(expected)
    # Steps before the checkpoint were not taken again: even their times are those of then.
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[: saved + 1] == before
    ours, theirs = ((o / "model/model.safetensors").read_bytes() for o in (tmp_path, expected))
    assert ours == theirs
    ours, theirs = (last_state(output) for output in (tmp_path, expected))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(own, other)


@slow
def test_two_processes_have_the_losses_of_one_with_two_devices(files, uninterrupted, tmp_path):
    joined = ("--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", 2)
    running = [
        begin(files, tmp_path, "dynamiq:5", *joined, "--process-id", rank) for rank in range(2)
    ]
    try:
        texts = [end(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert "perplexity" in texts[0] and "perplexity" not in texts[1]  # one of them reports
    assert losses(tmp_path) == losses(uninterrupted("dynamiq:5"))


# ----------------------------------------------------------------------------------------- the step


def task_of(files, fsdp=1, **options):
    """What two workers train on in this process."""
    options = {"checkpoint": files / "start"} | options
    axes, devices = (AxisType.Auto,) * 2, jax.devices()[: WORKERS * fsdp]
    mesh = jax.make_mesh((WORKERS, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)
    return finetune_llm.read_task(
        finetune_llm.Options(data=files / "chats.jsonl", context=64, fsdp=fsdp, **options),
        mesh,
    )[1]


def trained(task, folder):
    """Parameters and records of three exact steps."""
    recipe = Recipe(parse_setting("psum"), steps=3, learning_rate=1e-2)
    # Optax adds float32 to int32, which the tests forbid elsewhere.
    with jax.numpy_dtype_promotion("standard"):
        params, records = finetune(task, recipe, Every(save=9), folder)
    return jax.tree.leaves(params), records


@pytest.fixture(scope="module")
def plain(files, tmp_path_factory):
    return trained(task_of(files, batch=4), tmp_path_factory.mktemp("plain"))


def test_the_gradient_is_that_of_the_mean_over_all_targets(files, plain):
    """Workers have different numbers of targets: a mean of their own means would be another."""
    task = task_of(files, batch=4)
    rows = Rows(*(f[rows_of_step(len(f), count=8, seed=0, step=0)] for f in task.rows))
    counts = rows.learned.reshape(WORKERS, -1).sum(axis=1)
    assert counts[0] != counts[1]

    def loss(params):
        return loss_and_hits(task.structure, params, rows)[0] / np.float32(counts.sum())

    expected, grads = jax.jit(jax.value_and_grad(loss))(jax.device_get(task.load()))
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(grads)))
    _, records = plain
    assert records[1]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert records[1]["gradient_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    (
        pytest.param({"batch": 4, "fsdp": 2}, id="sharded parameters"),
        pytest.param({"batch": 2, "accumulate": 2}, id="two micro-batches"),
    ),
)
def test_what_only_saves_memory_trains_the_same(options, plain, files, tmp_path):
    leaves, records = trained(task_of(files, **options), tmp_path)
    for name in ("loss", "gradient_norm"):
        own, other = ([record[name] for record in r[1:]] for r in (records, plain[1]))
        np.testing.assert_allclose(own, other, rtol=1e-4)
    for ours, theirs in zip(leaves, plain[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    parts = {leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves}
    assert max(parts) == options.get("fsdp", 1)


# ------------------------------------------------------------------------------------- what is kept


def test_a_model_is_not_written_over_the_one_it_came_from(files):
    with pytest.raises(ValueError, match=r"--checkpoint is .*/model, which --output-dir"):
        task_of(files, checkpoint=files / "model", output_dir=files)


def test_another_number_of_workers_or_another_run_is_refused(uninterrupted):
    output = uninterrupted("dynamiq:5")
    facts = json.loads((output / "run.json").read_text())
    with Snapshots(output, facts) as snapshots:
        assert snapshots.step == STEPS
    with pytest.raises(CommandError, match=r"--workers is 4, but .* begun with 2.*--restart"):
        Snapshots(output, facts | {"workers": 4})
    with pytest.raises(CommandError, match=r"begun with seed 0, now 1\."):
        Snapshots(output, facts | {"seed": 1})


def test_to_forget_a_run_leaves_everything_else(tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "thesis.txt"):
        (tmp_path / name).touch()
    forget(tmp_path)
    forget(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_metrics_forget_what_comes_after_the_checkpoint_and_torn_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    metrics = Metrics(tmp_path, steps=1)
    metrics.append({"step": 2, "loss": 1.0})
    metrics.close()
    expected = [{"step": 0}, {"step": 1}, {"step": 2, "loss": 1.0}]
    assert metrics.records == read(tmp_path / "metrics.jsonl") == expected


def test_a_run_that_diverged_is_reported(tmp_path):
    bad = {"loss": math.nan, "seconds": 1.0, "vnmse": math.inf}
    ends = {"evaluation_loss": math.nan, "perplexity": math.nan, "accuracy": 0.1}
    wire = dq.wire_report(jax.ShapeDtypeStruct((4096,), "float32"), 2)
    run = report.Run("bad", [{"step": 0} | ends, {"step": 1} | bad | ends], wire)
    report.save_plot([run], tmp_path / "a.png")
    report.save_json([run], {}, tmp_path / "a.json")
    assert report.table([run]).row_count == 10
    content = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert content["runs"]["bad"]["accuracy"] == 0.1


def test_weights_are_written_as_config_says_or_refused():
    for source, dtype in (({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16")):
        assert written_dtype(SimpleNamespace(source=source)) == dtype
    for name in ("float64", "auto"):
        with pytest.raises(ValueError, match=f"config.json has dtype '{name}'.*one of bfloat16"):
            written_dtype(SimpleNamespace(source={"dtype": name}))


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"steps": 0}, "--steps is 0: give at least 1"),
        ({"context": 0}, "--context is 0: give at least 1"),
        ({"fsdp": 2, "batch": 3}, "--batch is 3: give a multiple of --fsdp, which is 2"),
        ({"checkpoint": pathlib.Path("a")}, "--data is None: give --checkpoint and --data"),
        ({"num_processes": 2}, "give --coordinator, --num-processes and --process-id"),
        ({"evaluation_share": 1.0}, "--evaluation-share is 1.0"),
    ),
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        finetune_llm.Options(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({"method": "dynamic"}, "--method: 'dynamic': no method 'dynamic'"),
        ({"checkpoint": pathlib.Path("none"), "data": pathlib.Path("none")}, "--checkpoint"),
    ),
)
def test_what_shows_later_is_refused_in_one_line(options, words, monkeypatch, data_mesh):
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 1), ("data", "fsdp"), axis_types=axes, devices=jax.devices()[:2])
    monkeypatch.setattr(finetune_llm, "make_mesh", lambda *_, **__: mesh)
    with pytest.raises(SystemExit, match=f"^finetune_llm.py: {words}"):
        finetune_llm.main(finetune_llm.Options(**options))
