"""Runs of the fine-tuning example: they resume bit-identically, and everything is recorded."""

import json
import math
import shutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import dynamiq_jax as dq
from examples import finetune_llm
from examples.llm import finetuning, links, report
from examples.llm.averaging import Averaging
from examples.llm.errors import RunError
from examples.llm.export import written_dtype
from examples.llm.metrics import Metrics, read
from examples.llm.options import Options
from examples.llm.snapshots import Snapshots, forget
from examples.llm.training import Recipe, initial_state
from tests.support import llm_files
from tests.support.commands import shown
from tests.support.llm_files import last_state, losses

STEPS = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder


@pytest.fixture(scope="module")
def command(files):
    """`command(output)`: run the command in this process, two workers of two devices each.

    Its step is compiled once.
    """
    steps = []

    def train_step(*arguments):
        steps.append(make_step(*arguments))
        return steps[0]

    def run(output, **more):
        options = {
            "checkpoint": files / "start",
            "data": files / "chats.jsonl",
            "output_dir": output,
            "method": "ef+topk_chunked:4",
            "context": 64,
            "fsdp": 2,
            "steps": STEPS,
            "learning_rate": 1e-2,
            "evaluate_every": 4,
            "save_every": 3,
            "sample_vnmse": 3,
        }
        # Optax adds float32 to int32, which the tests forbid elsewhere.
        with jax.numpy_dtype_promotion("standard"):
            finetune_llm.main(Options(**options | more))

    with pytest.MonkeyPatch.context() as patch:
        make_step = finetuning.train_step
        patch.setattr(finetuning, "train_step", train_step)
        patch.setattr(finetune_llm, "make_mesh", lambda *_, **__: llm_files.mesh_of(2, 2))
        yield run


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
    assert [r["step"] for r in records if "vnmse" in r] == [1, 4, 7]
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
    assert (output / "curves.png").stat().st_size > 0
    (name,) = json.loads((output / "results.json").read_text())["runs"]
    assert name == "ef+topk_chunked:4:ring"


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
    ours, theirs = (last_state(o, STEPS) for o in (interrupted, output))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_another_number_of_workers_or_another_run_is_refused(output):
    facts = json.loads((output / "run.json").read_text())
    with Snapshots(output, facts) as snapshots:
        assert snapshots.step == STEPS
    words = r"--workers is 4, but .* started with 2.*--restart"
    with pytest.raises(RunError, match=words):
        Snapshots(output, facts | {"workers": 4})
    with pytest.raises(RunError, match=r"started with seed 0, now 1\."):
        Snapshots(output, facts | {"seed": 1})


def test_a_run_with_another_method_is_refused_in_one_line(command, output):
    words = r"^finetune_llm: The run in .* averaging 'ef\+topk_chunked:4:ring', now 'bf16:ring'"
    with pytest.raises(SystemExit, match=words):
        command(output, method="bf16")


def test_a_run_with_other_data_is_refused(command, output):
    with pytest.raises(SystemExit, match=r"started with data '\w+', now '\w+'\."):
        command(output, context=32)


def test_a_model_is_not_written_over_the_one_it_came_from(files, command):
    with pytest.raises(SystemExit, match=r"--checkpoint is .*/model, which --output-dir"):
        command(files, checkpoint=files / "model")


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "method", ("dynamiq:5", "omnireduce", "powersgd", "ef+powersgd", "ef+topk_chunked")
)
def test_a_checkpoint_has_the_state_of_every_device(method, files, tmp_path):
    """Values are random: what a checkpoint leaves out shows."""
    mesh = llm_files.mesh_of(2, 2)
    options = Options(checkpoint=files / "start", data=files / "chats.jsonl", context=64)
    task = finetune_llm.read_task(options, mesh)[1]
    recipe = Recipe(averaging=Averaging(method=method), steps=3, learning_rate=1e-2)
    _, abstract = initial_state(recipe.optimizer(mesh), task.shapes, mesh)
    rng = np.random.default_rng(0)

    def draw(leaf):
        values = (1000 * rng.random(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    state = jax.tree.map(draw, abstract)
    is_stateful = bool(jax.tree.leaves(state.optimizer[0].all_reduce.method))
    assert is_stateful == recipe.averaging.is_stateful
    with Snapshots(tmp_path, {}) as snapshots:
        snapshots.save(5, state)
    with Snapshots(tmp_path, {}) as snapshots:
        assert snapshots.step == 5
        restored = snapshots.restore(abstract)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding


def test_to_forget_a_run_leaves_everything_else(tmp_path):
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    for name in ("run.json", "metrics.jsonl", "thesis.txt"):
        (tmp_path / name).touch()
    forget(tmp_path)
    forget(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("content", "words"),
    (
        ("{", r"run\.json is broken JSON: .* Give --restart or another"),
        ("[]", r"run\.json has a list, not a JSON object\. Give --restart"),
        (None, r"run\.json is missing\. Give --restart"),
        ("{}", "--workers is 2, but .* started with None"),
    ),
)
def test_a_run_whose_facts_cannot_be_read_is_refused(content, words, tmp_path):
    with Snapshots(tmp_path, {"workers": 2}) as snapshots:
        snapshots.save(1, {"a": np.ones(2, np.float32)})
    (tmp_path / "run.json").unlink()
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=words):
        Snapshots(tmp_path, {"workers": 2})


# ------------------------------------------------------------------------------- records and report


def test_metrics_forget_what_comes_after_the_checkpoint_and_torn_lines(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    metrics = Metrics(tmp_path, steps=1)
    metrics.append({"step": 2, "loss": 1.0})
    metrics.close()
    expected = [{"step": 0}, {"step": 1}, {"step": 2, "loss": 1.0}]
    assert metrics.records == read(tmp_path / "metrics.jsonl") == expected


def test_scalars_of_every_record_go_to_a_board(tmp_path, monkeypatch):
    """To any class with the interface of tensorboardX's `SummaryWriter`."""
    written = []

    class Board:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    package = ModuleType("tensorboardX")
    package.__spec__ = ModuleSpec("tensorboardX", loader=None)
    package.SummaryWriter = Board
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    metrics = Metrics(tmp_path, steps=1)
    metrics.append({"step": 2, "loss": 1.5, "compression/error": 0.003})
    metrics.close()
    scalars = [("loss", 1.5, 2), ("compression/error", 0.003, 2)]
    assert written == [(str(tmp_path / "tensorboard"), 2), *scalars, "closed"]


def test_a_run_that_diverged_is_reported(tmp_path):
    bad = {"loss": math.nan, "seconds": 1.0, "vnmse": math.inf}
    ends = {"evaluation_loss": math.nan, "perplexity": math.nan, "accuracy": 0.1}
    wire = dq.wire_report(jax.ShapeDtypeStruct((4096,), "float32"), 2)
    records = [{"step": 0} | ends, {"step": 1} | bad | ends]
    run = report.Run(name="bad", records=records, wire=wire)
    report.save_plot([run], tmp_path / "a.png")
    report.save_json([run], {}, tmp_path / "a.json")
    assert report.table([run]).row_count == 11
    content = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert content["runs"]["bad"]["accuracy"] == 0.1


def test_a_step_between_hosts_is_predicted_from_two_runs():
    """Two workers share the processors, so that each takes half of the measured time."""
    ends = {"evaluation_loss": 1.0, "perplexity": 2.0, "accuracy": 0.1}
    tree = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}

    def run(name, seconds, method):
        step = {"step": 1, "loss": 1.0, "vnmse": 0.0, "seconds": seconds, **ends}
        return report.Run(name=name, records=[step], wire=dq.wire_report(tree, 2, method=method))

    exact, compressed = run("exact", 0.2, "exact"), run("small", 0.3, "dynamiq:5")
    found = links.Prediction.of(exact, compressed, sharing=2)
    sent = 4 * 2**20
    assert found.compute == pytest.approx(0.1) and found.codec == pytest.approx(0.05)
    assert found.exact_bytes == sent and found.compressed_bytes < 0.17 * sent
    at = found.seconds(0.8)  # 100 MB/s
    assert at[:2] == pytest.approx((0.1 + sent / 1e8, 0.1 + sent / 2e8))
    assert at[2] == pytest.approx(0.15 + found.compressed_bytes / 1e8)
    _, half, small = found.seconds(found.break_even)
    assert half == pytest.approx(small)
    assert all(found.seconds(rate)[2] < found.seconds(rate)[1] for rate in (0.01, 0.1))
    text = shown(links.table(found, "small"))
    assert "0.2 Gbit/s" in text and "100 Gbit/s" in text and "pays on links below" in text
    free = links.Prediction.of(exact, run("small", 0.1, "dynamiq:5"), sharing=2)
    assert "pays on every link" in shown(links.table(free, "small"))
    larger = links.Prediction.of(exact, run("large", 0.3, "exact"), sharing=2)
    assert "pays on no link" in shown(links.table(larger, "large"))


def test_weights_are_written_as_config_says_or_refused():
    for source, dtype in (({}, "float32"), ({"torch_dtype": "bfloat16"}, "bfloat16")):
        assert written_dtype(SimpleNamespace(source=source)) == dtype
    for name in ("float64", "auto"):
        with pytest.raises(ValueError, match=f"config.json has dtype '{name}'.*one of bfloat16"):
            written_dtype(SimpleNamespace(source={"dtype": name}))
