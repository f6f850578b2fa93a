"""A fine-tuning run, from the start or from its last checkpoint."""

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and the devices that train it."""

    structure: nnx.GraphDef  # of the model
    shapes: Params  # of its parameters
    load: Callable[[], Params]  # reads the initial parameters, float32, onto their devices
    rows: Rows  # to train on, as NumPy arrays
    held_out: Rows  # to evaluate on
    mesh: Mesh  # with axes "data" and "fsdp"
    model: str  # short description; a run resumes with the same model only
    batch: int  # rows per worker and micro-batch
    micro_batches: int = 1  # per step

    @property
    def rows_at_once(self) -> int:
        """Rows in a micro-batch of all workers."""
        return self.mesh.shape["data"] * self.batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Every:
    """Numbers of steps between events. They do not change what is trained."""

    evaluate: int = 20  # held-out loss
    save: int = 50  # checkpoint
    vnmse: int = 20  # error of the mean gradient


def finetune(
    task: Task,
    recipe: Recipe,
    every: Every,
    folder: Path,
    on_step: Callable[[Record], None] = lambda record: None,
) -> tuple[Params, list[Record]]:
    """Train, starting from the last checkpoint in a folder if there is one.

    Args:
      task: model, data and devices.
      recipe: hyperparameters.
      every: when to evaluate, save and measure.
      folder: folder of the checkpoints and metrics.jsonl.
      on_step: called with the record of each step.

    Returns:
      The trained parameters, on their devices, and the records: of step 0, before the first update,
      and of each step after its update.

    Raises:
      RunError: the folder has a run that was started with other options.
    """
    mesh, steps = task.mesh, recipe.steps
    optimizer = recipe.optimizer(mesh)
    start, abstract = initial_state(optimizer, task.shapes, mesh)
    take_step = train_step(task.structure, optimizer, abstract, mesh)
    evaluate = evaluator(task.structure, task.held_out, task.rows_at_once, mesh)
    sent = wire_report(recipe.averaging, task.shapes, mesh).bytes_per_worker
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
                # Without this wait, several steps in flight on virtual CPU devices would compete
                # for the few threads that their collectives need.
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
                for name, value in report.compression.items():
                    record[f"compression/{name}"] = float(value)
                if measure:
                    record["vnmse"] = float(report.vnmse)
                last = step + 1 == steps
                if last or (step + 1) % every.evaluate == 0:
                    record |= evaluate(state.params)._asdict()
                metrics.append(record)
                if last or (step + 1) % every.save == 0:
                    # First the records: those of the steps before a checkpoint have to be there.
                    metrics.sync()
                    snapshots.save(step + 1, state)
                on_step(record)
    return state.params, metrics.records


def _rows_of_step(task: Task, seed: int, step: int) -> Rows:
    """Place the rows of a step, `[micro_batches, rows_at_once, context]`, on their devices."""
    shape = task.micro_batches, task.rows_at_once
    indices = rows_of_step(len(task.rows.tokens), count=math.prod(shape), seed=seed, step=step)
    return place(task.rows, indices.reshape(shape), task.mesh)


def _facts(task: Task, recipe: Recipe) -> Facts:
    """Collect everything that the losses of a run depend on."""
    digest = hashlib.blake2b(digest_size=8)
    for field in task.rows:
        digest.update(np.ascontiguousarray(field))
    return {
        **dataclasses.asdict(recipe),
        "averaging": recipe.averaging.name,
        "workers": task.mesh.shape["data"],
        "fsdp": task.mesh.shape["fsdp"],
        "batch": task.batch,
        "micro_batches": task.micro_batches,
        "model": task.model,
        "data": digest.hexdigest(),
    }
