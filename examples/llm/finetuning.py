"""One run from beginning to end, or from where it was interrupted."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from examples.llm.batches import place, rows_of_step
from examples.llm.evaluation import evaluator
from examples.llm.metrics import Metrics, Record
from examples.llm.packing import Rows
from examples.llm.reduction import wire_report
from examples.llm.snapshots import Facts, Snapshots
from examples.llm.training import Params, Recipe, initial_state, train_step


@dataclass(frozen=True)
class Task:
    """What to train on.

    Attributes:
        structure: Structure of the model.
        shapes: Shapes of its parameters.
        load: Reads the parameters to begin with, float32, each part onto its devices.
        rows: Rows to train on, as NumPy arrays.
        held_out: Rows to evaluate on.
        mesh: Axes "data" and "fsdp".
        model: What the model is, in a word. A run goes on with the same only.
        batch: Rows per worker and micro-batch.
        micro_batches: How many of them make one step.
    """

    structure: nnx.GraphDef
    shapes: Params
    load: Callable[[], Params]
    rows: Rows
    held_out: Rows
    mesh: Mesh
    model: str
    batch: int
    micro_batches: int = 1

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch of all workers."""
        return self.mesh.shape["data"] * self.batch


@dataclass(frozen=True)
class Every:
    """After how many steps something happens.

    Attributes:
        evaluate: The held-out loss is measured.
        save: A checkpoint is written.
        vnmse: The error of the mean gradient is measured.
    """

    evaluate: int = 20
    save: int = 50
    vnmse: int = 20


def finetune(
    task: Task,
    recipe: Recipe,
    every: Every,
    folder: Path,
    on_step: Callable[[Record], None] = lambda record: None,
) -> tuple[Params, list[Record]]:
    """Trains, from the last checkpoint in `folder` if there is one.

    Args:
        task: What to train on.
        recipe: How to train.
        every: When to look and to save. Does not change what is trained.
        folder: Where checkpoints and metrics.jsonl are.
        on_step: Called with the record of every step.

    Returns:
        The trained parameters, on their devices, and the records of all steps: of step 0, before
        the first update, and of every step after its update.

    Raises:
        CommandError: The folder has a run that was begun otherwise.
    """
    mesh, steps = task.mesh, recipe.steps
    optimizer = recipe.optimizer(mesh)
    start, abstract = initial_state(optimizer, task.shapes, mesh)
    take_step = train_step(task.structure, optimizer, abstract, mesh)
    evaluate = evaluator(task.structure, task.held_out, task.rows_at_once, mesh)
    sent = wire_report(recipe.setting, task.shapes, mesh).bytes_per_worker
    schedule = recipe.schedule()

    with Snapshots(folder, _facts(task, recipe)) as snapshots:
        done = snapshots.step
        state = snapshots.restore(abstract) if done else start(task.load())
        with closing(Metrics(folder, steps=done if done else -1)) as metrics:
            if not done:
                metrics.append({"step": 0, **evaluate(state.params)._asdict()})
            for step in range(done, steps):
                begin = time.perf_counter()
                measure = step % every.vnmse == 0
                rows = _rows_of_step(task, recipe.seed, step)
                state, report = take_step(state, rows, np.bool_(measure))
                # Waiting is more than a matter of timing: several steps in flight on virtual CPU
                # devices would compete for the few threads that their collectives need.
                jax.block_until_ready(state)
                seconds = time.perf_counter() - begin
                record: Record = {
                    "step": step + 1,
                    "loss": float(report.loss),
                    "gradient_norm": float(report.norm),
                    "learning_rate": float(schedule(step)),
                    "seconds": seconds,
                    "tokens_per_second": int(report.tokens) / seconds,
                    "bytes_sent": sent,
                }
                if measure:
                    record["vnmse"] = float(report.vnmse)
                last = step + 1 == steps
                if last or (step + 1) % every.evaluate == 0:
                    record |= evaluate(state.params)._asdict()
                metrics.append(record)
                if last or (step + 1) % every.save == 0:
                    metrics.sync()  # First: a checkpoint says that its steps are recorded.
                    snapshots.save(step + 1, state)
                on_step(record)
    return state.params, metrics.records


def _rows_of_step(task: Task, seed: int, step: int) -> Rows:
    """Rows `[micro_batches, rows_at_once, context]` on their devices."""
    shape = task.micro_batches, task.rows_at_once
    indices = rows_of_step(len(task.rows.tokens), count=math.prod(shape), seed=seed, step=step)
    return place(task.rows, indices.reshape(shape), task.mesh)


def _facts(task: Task, recipe: Recipe) -> Facts:
    """All that the losses of a run depend on."""
    facts: dict[str, Any] = asdict(recipe) | {"setting": recipe.setting.name}
    digest = hashlib.blake2b(digest_size=8)
    for field in task.rows:
        digest.update(np.ascontiguousarray(field))
    return facts | {
        "workers": task.mesh.shape["data"],
        "fsdp": task.mesh.shape["fsdp"],
        "batch": task.batch,
        "micro_batches": task.micro_batches,
        "model": task.model,
        "data": digest.hexdigest(),
    }
