"""Train steps of the fine-tuning example: what is trained, and what travels, on every route."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import dynamiq_jax as dq
from examples import finetune_llm
from examples.llm import run
from examples.llm.data import Rows, place, rows_of_step
from examples.llm.loss import evaluator, sum_of_losses
from examples.llm.recipe import ROUTES, Recipe
from examples.llm.routes import make_trainer
from examples.tests.support import llm_files

WORKERS = 2


@pytest.mark.parametrize(
    ("options", "words"),
    (({"workers": 16}, "Their product has to be 8"), ({"fsdp": 16, "batch": 16}, "has to be 8")),
)
def test_too_few_devices_are_refused(options, words, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # JAX has its devices already
    with pytest.raises(ValueError, match=words):
        finetune_llm.make_mesh(finetune_llm.Options(**options))


def test_one_accelerator_is_left_for_virtual_devices_with_a_word(monkeypatch, capsys):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    cpus = jax.devices()
    kind = cpus[0].device_kind
    monkeypatch.setattr(jax, "devices", lambda platform=None: cpus if platform else cpus[:1])
    assert finetune_llm.make_mesh(finetune_llm.Options()).size == len(cpus)
    assert f"One {kind} is not enough for 2 workers" in capsys.readouterr().out
    assert finetune_llm.make_mesh(finetune_llm.Options(method="exact")).size == 1
    assert capsys.readouterr().out == ""


def task_of(files, fsdp=1, **options):
    given = {"checkpoint": files / "start", "data": files / "chats.jsonl", "context": 64}
    options = finetune_llm.Options(**given | {"fsdp": fsdp} | options)
    return finetune_llm.read_task(options, llm_files.mesh_of(WORKERS, fsdp))[1]


@pytest.fixture(scope="module")
def on_one(files):
    """Parameters and losses of training on one device."""
    with jax.numpy_dtype_promotion("standard"):
        return on_one_device(task_of(files), Recipe(steps=3, learning_rate=1e-2), batch=8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("method", "route"), (("exact", None), *(("uncompressed", route) for route in ROUTES))
)
def test_training_is_that_of_one_device_on_the_mean_over_all_targets(
    method, route, on_one, files, tmp_path
):
    """Workers have other numbers of targets: the mean of their means would be another one."""
    task = task_of(files, batch=4, fsdp=2)
    recipe = Recipe(method=method, route=route, steps=3, learning_rate=1e-2)
    params, records = run.train(task, recipe, tmp_path)
    expected, expected_losses = on_one
    for record, loss in zip(records[1:], expected_losses, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    leaves = jax.tree.leaves(params)
    assert max(leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves) == 2


def on_one_device(task, recipe, batch):
    """Parameters after the steps of a recipe, by AdamW on clipped gradients, and their losses."""
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
            return sum_of_losses(task.structure, params, rows) / jnp.sum(rows.learned)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for index in range(recipe.steps):
        chosen = rows_of_step(len(task.rows.tokens), count=batch, seed=0, step=index)
        rows = Rows(*(field[chosen] for field in task.rows))
        counts = rows.learned.reshape(WORKERS, -1).sum(axis=1)
        assert index or counts[0] != counts[1]
        params, state, loss = step(params, state, rows)
        losses.append(float(loss))
    return params, losses


def test_the_evaluation_is_the_mean_over_all_held_out_targets(files):
    """The last batch is filled up with rows that do not count."""
    task = task_of(files)
    rows, params = task.held_out, jax.device_get(task.load())
    assert len(rows.tokens) % 6
    loss = evaluator(task.structure, rows, 6, task.mesh)(task.load())
    exact = jax.jit(lambda params: sum_of_losses(task.structure, params, rows))(params)
    assert loss == pytest.approx(float(exact) / rows.learned.sum(), rel=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("fsdp", [1, 2])
@pytest.mark.parametrize("method", ["dynamiq:5", "ef+bf16"])
def test_gradients_travel_between_workers_only_and_in_as_many_bytes_as_reported(
    method, fsdp, files
):
    """Each device sends its part. Beside the gradients travel a key, the loss and its targets."""
    task = task_of(files, fsdp=fsdp)
    recipe = Recipe(steps=3, learning_rate=1e-2, method=method)
    trainer = make_trainer(recipe, task.structure, task.shapes, task.mesh)
    rows = place(task.rows, np.arange(2 * WORKERS), task.mesh)
    found = dq.inspect(trainer.step, trainer.abstract, rows)
    sent = sum(row.bytes for row in found.rows if "data" in row.over)
    assert 0 < found.bytes_compressed < trainer.bytes_sent <= sent <= trainer.bytes_sent + 32


def test_every_matrix_of_the_plain_step_is_compressed(files):
    """Nothing of its rows is lost on the way through masks, remat and the scan over logits."""
    task = task_of(files)
    recipe = Recipe(steps=3, learning_rate=1e-2, method="dynamiq:5")
    trainer = make_trainer(recipe, task.structure, task.shapes, task.mesh)
    rows = place(task.rows, np.arange(2 * WORKERS), task.mesh)
    found = trainer.step.report(trainer.abstract, rows).compressed
    least, leaves = dq.Compression().exact_below, jax.tree.leaves(task.shapes)
    large = sorted(leaf.shape for leaf in leaves if leaf.size >= least)
    assert sorted(each.sum.shape for each in found) == large


@pytest.mark.slow
def test_the_plain_step_learns_the_same_compressed(files, tmp_path):
    task, losses, ends = task_of(files), [], []
    for method in ("exact", "dynamiq:5"):
        recipe = Recipe(steps=8, learning_rate=1e-2, method=method)
        _, (start, *records) = run.train(task, recipe, tmp_path / method)
        losses.append([record["loss"] for record in records])
        ends.append(records[-1]["evaluation_loss"])
        assert ends[-1] < 0.7 * start["evaluation_loss"]
    exact, compressed = losses
    assert compressed[0] == pytest.approx(exact[0], rel=1e-6)  # before any update
    assert compressed == pytest.approx(exact, rel=0.02)
    assert 1e-6 < abs(ends[1] - ends[0]) < 0.02 * ends[0]


@pytest.mark.parametrize(
    ("method", "route"),
    (
        ("exact", "compress"),
        ("dynamiq:4", "compress"),
        ("mxfp8", "compress"),
        ("ef+mxfp4", "all_reduce_gradients"),
        ({"embed": "exact", "*": "dynamiq:5"}, "all_reduce_gradients"),
    ),
)
def test_a_method_has_the_route_that_it_needs(method, route):
    assert Recipe(method=method, steps=3, learning_rate=1e-2).chosen_route == route


def test_a_state_is_refused_where_no_place_for_it_is(files):
    task = task_of(files)
    recipe = Recipe(method="ef+mxfp4", route="compress", steps=3, learning_rate=1e-2)
    with pytest.raises(ValueError, match="all_reduce_gradients"):
        make_trainer(recipe, task.structure, task.shapes, task.mesh)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["dynamiq:5", "ef+mxfp4"])
def test_a_checkpoint_has_the_state_of_every_device(method, files, tmp_path):
    """Values are random: what a checkpoint leaves out shows."""
    task, mesh = task_of(files, fsdp=2), llm_files.mesh_of(2, 2)
    recipe = Recipe(method=method, steps=3, learning_rate=1e-2)
    abstract = make_trainer(recipe, task.structure, task.shapes, mesh).abstract
    rng = np.random.default_rng(0)

    def draw(leaf):
        values = (1000 * rng.random(leaf.shape)).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    state = jax.tree.map(draw, abstract)
    # The first part of the optimizer averages, or else clips.
    is_stateful = bool(jax.tree.leaves(getattr(state.optimizer[0], "method", ())))
    assert is_stateful == dq.methods.resolve_method(method).is_stateful
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(5, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(5, args=ocp.args.StandardRestore(abstract))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype and ours.sharding == theirs.sharding
