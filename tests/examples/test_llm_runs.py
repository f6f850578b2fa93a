"""Runs of the fine-tuning example: what is trained, and that they resume bit-identically."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file

import dynamiq_jax as dq
from examples import finetune_llm
from examples.finetune_llm import Options
from examples.llm import run
from examples.llm.data import Rows, rows_of_step
from examples.llm.run import read_records
from examples.llm.training import Recipe, evaluator, initial_state, loss_of_rows
from tests.support import llm_files, processes
from tests.support.llm_files import last_state, losses

ROOT = pathlib.Path(__file__).parents[2]
STEPS, WORKERS = 8, 2
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax adds float32 to int32, which the tests forbid elsewhere."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def command(files):
    """`command(output)`: run the command in this process, two workers of two devices each.

    Its step is compiled once.
    """
    steps, make_step = [], run.train_step

    def train_step(*arguments):
        steps.append(steps[0] if steps else make_step(*arguments))
        return steps[0]

    def main(output, **more):
        options = {
            "checkpoint": files / "start",
            "data": files / "chats.jsonl",
            "output_dir": output,
            "method": "ef+topk_chunked:4",
            "context": 64,
            "fsdp": 2,
            "steps": STEPS,
            "learning_rate": 1e-2,
            "save_every": 3,
        }
        with jax.numpy_dtype_promotion("standard"):
            finetune_llm.main(Options(**options | more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "train_step", train_step)
        patch.setattr(run, "EVALUATE_EVERY", 4)
        patch.setattr(finetune_llm, "make_mesh", lambda options: llm_files.mesh_of(2, 2))
        yield main


@pytest.fixture(scope="module")
def output(command, tmp_path_factory):
    """The output folder of a run of `STEPS` steps."""
    folder = tmp_path_factory.mktemp("output")
    command(folder)
    return folder


# -------------------------------------------------------------------------------------- one command


def test_the_command_learns_and_writes_a_checkpoint_that_it_can_read(files, output):
    records = losses(output)
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert [r["step"] for r in records if "evaluation_loss" in r] == [0, 4, 8]
    assert records[-1]["evaluation_loss"] < 0.8 * records[0]["evaluation_loss"]
    assert 0.001 < records[-1]["error"] < 1 and records[-1]["bytes"] > 0
    before, after = (
        load_file(folder / "model.safetensors") for folder in (files / "start", output / "model")
    )
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
    assert losses(interrupted) == losses(output)
    # Steps before the checkpoint are not taken again: even their times are the same.
    assert (interrupted / "metrics.jsonl").read_text().splitlines()[:7] == lines[:7]
    ours, theirs = ((o / "model/model.safetensors").read_bytes() for o in (interrupted, output))
    assert ours == theirs
    jax.tree.map(
        np.testing.assert_array_equal, *(last_state(o, STEPS) for o in (interrupted, output))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"method": "bf16"}, r"method 'ef\+topk_chunked:4', now 'bf16'"),
        ({"context": 32}, r"data '\w+', now '\w+'\."),
        ({"seed": 1}, r"seed 0, now 1\."),
    ),
)
def test_another_run_is_not_resumed(command, output, change, words):
    with pytest.raises(SystemExit, match=rf"^finetune_llm: The run in .* started with {words}"):
        command(output, **change)


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
        Options(**options)


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


@pytest.mark.parametrize(
    ("options", "words"),
    (({"workers": 16}, "Their product has to be 8"), ({"fsdp": 16, "batch": 16}, "has to be 8")),
)
def test_too_few_devices_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        finetune_llm.make_mesh(Options(**options))


# ------------------------------------------------------------------------------------- the gradient


def task_of(files, fsdp=1, **options):
    given = {"checkpoint": files / "start", "data": files / "chats.jsonl", "context": 64}
    options = Options(**given | {"fsdp": fsdp} | options)
    return finetune_llm.read_task(options, llm_files.mesh_of(WORKERS, fsdp))[1]


def test_training_is_that_of_one_device_on_the_mean_over_all_targets(files, tmp_path):
    """Workers have other numbers of targets: the mean of their means would be another one."""
    task, recipe = task_of(files, batch=4, fsdp=2), Recipe(steps=3, learning_rate=1e-2)
    params, records = run.train(task, recipe, tmp_path)
    expected, reports = on_one_device(task_of(files), recipe, batch=8)
    for record, (loss, norm) in zip(records[1:], reports, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4)
        assert record["norm"] == pytest.approx(norm, rel=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    leaves = jax.tree.leaves(params)
    assert max(leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves) == 2


def on_one_device(task, recipe, batch):
    """Parameters after the steps of a recipe by AdamW as written, and each loss and norm."""
    rise = round(0.1 * recipe.steps)
    schedule = optax.warmup_cosine_decay_schedule(
        recipe.learning_rate / (rise + 1), recipe.learning_rate, rise, recipe.steps, 1e-3
    )
    mask = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.01, mask=mask)
    rule = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    params = jax.device_get(task.load())
    state = rule.init(params)

    @jax.jit
    def step(params, state, rows):
        def loss(params):
            return loss_of_rows(task.structure, params, rows) / jnp.sum(rows.learned)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    reports = []
    for index in range(recipe.steps):
        chosen = rows_of_step(len(task.rows.tokens), count=batch, seed=0, step=index)
        rows = Rows(*(field[chosen] for field in task.rows))
        counts = rows.learned.reshape(WORKERS, -1).sum(axis=1)
        assert index or counts[0] != counts[1]
        params, state, loss, norm = step(params, state, rows)
        reports.append((float(loss), float(norm)))
    return params, reports


def test_the_evaluation_is_the_mean_over_all_held_out_targets(files):
    """The last batch is filled up with rows that do not count."""
    task = task_of(files)
    rows, params = task.held_out, jax.device_get(task.load())
    assert len(rows.tokens) % 6
    loss = evaluator(task.structure, rows, 6, task.mesh)(task.load())
    exact = jax.jit(lambda params: loss_of_rows(task.structure, params, rows))(params)
    assert loss == pytest.approx(float(exact) / rows.learned.sum(), rel=1e-5)


@pytest.mark.parametrize("method", ["bf16", "ef+bf16"])
def test_gradients_travel_between_workers_only_and_in_as_many_bytes_as_reported(files, method):
    """Each device sends its part; between the devices of a worker travel scalars."""
    task, recipe = task_of(files, fsdp=2), Recipe(steps=3, learning_rate=1e-2, method=method)
    optimizer = recipe.optimizer(task.mesh)
    _, abstract = initial_state(optimizer, task.shapes, task.mesh)
    grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), task.shapes)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract.optimizer[0])
    reduce, specs = optimizer.update, jax.P()
    del reduce, specs
    take_step = run.train_step(task.structure, optimizer, abstract, task.mesh)
    rows = Rows(*(field[:4] for field in task.rows))
    inspected = dq.inspect(take_step, abstract, rows)
    over_data = sum(row.bytes for row in inspected.rows if row.over == "data")
    report = dq.wire_report(
        grads,
        "data",
        mesh=task.mesh,
        specs=jax.tree.map(lambda leaf: leaf.sharding.spec, abstract.params),
        method=method,
        with_metrics=True,
    )
    assert report.bytes_per_worker <= over_data < 1.1 * report.bytes_per_worker + 200
    assert state.step.shape == ()


@pytest.mark.parametrize("method", ["dynamiq:5", "powersgd", "ef+powersgd", "ef+topk_chunked"])
def test_a_checkpoint_has_the_state_of_every_device(method, files, tmp_path):
    """Values are random: what a checkpoint leaves out shows."""
    task, mesh = task_of(files, fsdp=2), llm_files.mesh_of(2, 2)
    recipe = Recipe(method=method, steps=3, learning_rate=1e-2)
    _, abstract = initial_state(recipe.optimizer(mesh), task.shapes, mesh)
    rng = np.random.default_rng(0)

    def draw(leaf):
        values = (1000 * rng.random(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    state = jax.tree.map(draw, abstract)
    is_stateful = bool(jax.tree.leaves(state.optimizer[0].method))
    assert is_stateful == dq.methods.resolve_method(method).is_stateful
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(5, args=ocp.args.StandardRestore(abstract))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding


# --------------------------------------------------------------------------- processes of their own


def begin(files, output, *more) -> subprocess.Popen:
    """Starts a run of two workers, each with a residual and factors of its own."""
    environment = {
        **os.environ,
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
        "method": "ef+powersgd",
        "workers": 2,
        "steps": 6,
        "context": 64,
        "learning-rate": 1e-2,
        "save-every": 1,
    }
    words = [word for k, v in options.items() for word in (f"--{k}", str(v))] if files else []
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "examples.finetune_llm", *words, *map(str, more)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen) -> str:
    try:
        output = process.communicate(timeout=processes.TIMEOUT)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output[-4000:]
    return output


@slow
def test_killed_and_started_again_a_run_ends_with_the_bits_of_two_processes(files, tmp_path):
    """Nobody interrupts the two processes, which have one of its two devices each."""
    together, killed = tmp_path / "together", tmp_path / "killed"
    joined = ("--processes", f"127.0.0.1:{processes.free_port()}", 2)
    running = [begin(files, together, *joined, rank) for rank in range(2)]
    try:
        texts = [end(process) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert "held-out loss" in texts[0] and "held-out loss" not in texts[1]

    process = begin(files, killed)
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

    end(begin(files, killed))
    # Steps before the checkpoint are not taken again: even their times are the same.
    assert (killed / "metrics.jsonl").read_text().splitlines()[: saved + 1] == before
    assert losses(killed) == losses(together)
    ours, theirs = ((o / "model/model.safetensors").read_bytes() for o in (killed, together))
    assert ours == theirs
    jax.tree.map(np.testing.assert_array_equal, *(last_state(o, 6) for o in (killed, together)))


@slow
def test_without_a_checkpoint_it_makes_one_and_compares(tmp_path):
    short = ("--steps", 1, "--workers", 2, "--context", 32, "--output-dir", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "examples.finetune_llm", *map(str, short)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text = end(process)
    for name in ("before", "exact:ring", "dynamiq:5:ring", "bytes sent a step"):
        assert name in text
    assert "compression only takes time" in " ".join(text.split())
    assert (tmp_path / "model/model.safetensors").stat().st_size > 0
    exact, compressed = losses(tmp_path / "exact"), losses(tmp_path)
    assert exact[0] == compressed[0] and exact[1]["loss"] == compressed[1]["loss"]
    assert exact[1]["evaluation_loss"] != compressed[1]["evaluation_loss"]
    assert exact[1]["error"] < 1e-10 and 1e-4 < compressed[1]["error"] < 0.05
    assert compressed[1]["bytes"] < 0.2 * exact[1]["bytes"]
