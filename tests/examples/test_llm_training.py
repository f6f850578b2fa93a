"""Training of the fine-tuning example: the recipe, the gradient, and options that save memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples import finetune_llm
from examples.llm.averaging import Averaging
from examples.llm.batches import rows_of_step
from examples.llm.evaluation import evaluator
from examples.llm.finetuning import Every, finetune
from examples.llm.options import Options
from examples.llm.packing import Rows
from examples.llm.training import Recipe, loss_and_hits
from tests.support import llm_files

WORKERS = 2


def recipe(**changes) -> Recipe:
    exact = Averaging(method="psum")
    return Recipe(**{"averaging": exact, "steps": 3, "learning_rate": 1e-2} | changes)


# --------------------------------------------------------------------------------------- the recipe


def test_the_learning_rate_rises_over_a_tenth_and_falls_as_a_cosine_to_a_tenth():
    schedule = recipe(steps=100, learning_rate=2.0).schedule()
    with jax.numpy_dtype_promotion("standard"):
        rates = np.array([float(schedule(step)) for step in range(101)])
    np.testing.assert_allclose(rates[:11], np.linspace(2 / 11, 2, 11), rtol=1e-6)
    cosine = np.cos(np.pi * np.arange(91) / 90)
    np.testing.assert_allclose(rates[10:], 2 * (0.1 + 0.9 * (1 + cosine) / 2), rtol=1e-5)


def test_updates_are_those_of_adamw_on_the_clipped_gradient():
    """Only matrices decay. The second gradient is not clipped, so that the ratio shows."""
    rng = np.random.default_rng(0)
    params = {"matrix": rng.normal(size=(3, 4)), "vector": rng.normal(size=4)}
    grads = [{name: rng.normal(size=p.shape) for name, p in params.items()} for _ in range(2)]
    norm = [np.sqrt(sum(np.sum(g**2) for g in tree.values())) for tree in grads]
    clip = (norm[0] * norm[1]) ** 0.5
    assert norm[0] / norm[1] > 1.1 or norm[1] / norm[0] > 1.1
    rule = recipe(steps=10, learning_rate=0.5, weight_decay=0.25, clip=float(clip)).update_rule()
    state = rule.init(jax.tree.map(np.float32, params))
    expected = {name: p.copy() for name, p in params.items()}
    found = jax.tree.map(np.float32, params)
    first, second = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    for step, tree in enumerate(grads, start=1):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = rule.update(jax.tree.map(np.float32, tree), state, found)
            found = optax.apply_updates(found, updates)
        rate = (0.25, 0.5)[step - 1]  # One of ten steps is warm-up.
        for name, grad in tree.items():
            grad = grad * min(1, clip / norm[step - 1])
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            moved = first[name] / (1 - 0.9**step)
            moved = moved / (np.sqrt(second[name] / (1 - 0.95**step)) + 1e-8)
            decay = 0.25 * expected[name] if name == "matrix" else 0
            expected[name] -= rate * (moved + decay)
    for name in params:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- the gradient


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with a checkpoint and chats."""
    folder = tmp_path_factory.mktemp("llm")
    llm_files.write(folder)
    return folder


def task_of(files, fsdp=1, **options):
    """The task of two workers in this process."""
    given = {"checkpoint": files / "start", "data": files / "chats.jsonl", "context": 64}
    options = Options(**given | {"fsdp": fsdp} | options)
    return finetune_llm.read_task(options, llm_files.mesh_of(WORKERS, fsdp))[1]


def test_training_is_that_of_one_device_on_the_mean_over_all_targets(files, tmp_path):
    """With sharded parameters, two micro-batches, and blocks that are computed again.

    Workers have different numbers of targets: the mean of their means would be another one.
    """
    task = task_of(files, batch=2, fsdp=2, accumulate=2, remat=True)
    # Optax adds float32 to int32, which the tests forbid elsewhere.
    with jax.numpy_dtype_promotion("standard"):
        params, records = finetune(task, recipe(), Every(save=9), tmp_path)
        expected, reports = on_one_device(task_of(files), steps=3, batch=8)
    for record, (loss, norm) in zip(records[1:], reports, strict=True):
        assert record["loss"] == pytest.approx(loss, rel=1e-4)
        assert record["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    for ours, theirs in zip(*map(jax.tree.leaves, (params, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    leaves = jax.tree.leaves(params)
    parts = {leaf.size // leaf.addressable_shards[0].data.size for leaf in leaves}
    assert max(parts) == 2


def on_one_device(task, steps, batch):
    """Parameters after some steps, and the loss and gradient norm of each."""
    rule = recipe().update_rule()
    params = jax.device_get(task.load())
    state = rule.init(params)

    @jax.jit
    def step(params, state, rows):
        def loss(params):
            return loss_and_hits(task.structure, params, rows)[0] / jnp.sum(rows.learned)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, optax.tree.norm(grads)

    reports = []
    for index in range(steps):
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
    rows = task.held_out
    assert len(rows.tokens) % 6
    evaluation = evaluator(task.structure, rows, 6, task.mesh)(task.load())
    sums = jax.jit(lambda params: loss_and_hits(task.structure, params, rows))
    loss, hits = sums(jax.device_get(task.load()))
    count = rows.learned.sum()
    assert evaluation.evaluation_loss == pytest.approx(float(loss) / count, rel=1e-5)
    assert evaluation.perplexity == pytest.approx(np.exp(float(loss) / count), rel=1e-4)
    assert evaluation.accuracy == int(hits) / count
