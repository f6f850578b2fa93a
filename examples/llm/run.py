"""A run of training, from the start or from its last checkpoint."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from examples.llm.checkpoint import read_object
from examples.llm.data import Rows, place, rows_of_step
from examples.llm.loss import evaluator
from examples.llm.model import Params
from examples.llm.recipe import Recipe
from examples.llm.routes import Trainer, make_trainer
from examples.tools import budget, digests

EVALUATE_EVERY = 40  # steps
KEPT = 2  # checkpoints
REMEDY = "Give the same options, delete that folder, or give another --output-dir."
Record = dict[str, Any]
FACTS, METRICS, CHECKPOINTS = "run.json", "metrics.jsonl", "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data and the devices that train it."""

    structure: nnx.GraphDef  # of the model
    shapes: Params  # of its parameters
    load: Callable[[], Params]  # reads the initial parameters, float32, onto their devices
    rows: Rows  # to train on, as NumPy arrays
    held_out: Rows  # to evaluate on
    mesh: Mesh  # with axes "data" and "fsdp"
    model: str  # short description
    files: list[Path]  # with the configuration and the weights
    batch: int  # rows per worker

    def facts(self, recipe: Recipe) -> Record:
        """Collect everything that the losses of a run depend on."""
        return recipe.facts() | {
            "workers": self.mesh.shape["data"],
            "fsdp": self.mesh.shape["fsdp"],
            "model": self.model,
            "weights": digests.of_files(self.files),
            "data": digests.of_arrays(self.rows),
            "held_out": digests.of_arrays(self.held_out),
            "batch": self.batch,
        }


def check_runs(task: Task, recipes: dict[Path, Recipe], save_every: int) -> str:
    """Describe runs, with the disk and the time that they need, and refuse what cannot fit.

    Args:
      task: model, data and devices of all runs.
      recipes: hyperparameters by the folder of a run; the last one gets the trained model too.
      save_every: steps between checkpoints.

    Raises:
      ValueError: the disk has too little room.
    """
    mesh, count = task.mesh, sum(leaf.size for leaf in jax.tree.leaves(task.shapes))
    (*_, folder), disk, steps, evaluations = recipes, 4 * count, 0, 0
    for path, recipe in recipes.items():
        state = make_trainer(recipe, task.structure, task.shapes, mesh).abstract
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        # The oldest one is deleted when the new one is complete.
        most = min(KEPT + 1, -(-recipe.steps // save_every)) * size
        has = sum(f.stat().st_size for f in (path / CHECKPOINTS).rglob("*") if f.is_file())
        disk += max(most - has, 0)
        steps += recipe.steps
        evaluations += 1 + -(-recipe.steps // EVALUATE_EVERY)
    text = f"{count:,} parameters, {len(task.rows.tokens):,} rows, {mesh.shape['data']} worker(s) "
    text += f"of {mesh.shape['fsdp']} device(s)\n{len(recipes)} run(s), {steps} steps in all, need "
    text += budget.check_disk(folder, disk)
    if mesh.devices.flat[0].platform == "cpu":
        tokens = steps * mesh.shape["data"] * task.batch * task.rows.tokens.shape[1]
        tokens += evaluations * task.held_out.tokens.size / 3  # without a backward pass
        minutes = budget.seconds_of_training(task.shapes, tokens, steps * mesh.shape["data"]) / 60
        text += f", and about {minutes:,.1f} minutes of computing on a free machine"
    return text


def train(
    task: Task,
    recipe: Recipe,
    folder: Path,
    *,
    save_every: int = 50,
    on_start: Callable[[str], None] = lambda text: None,
    on_step: Callable[[Record], None] = lambda record: None,
) -> tuple[Params, list[Record]]:
    """Train, starting from the last checkpoint in a folder if there is one.

    Args:
      task: model, data and devices.
      recipe: hyperparameters.
      folder: folder of the checkpoints and records.
      save_every: steps between checkpoints.
      on_start: called before the first step with what it needs.
      on_step: called with the record of each step.

    Returns:
      The trained parameters, on their devices, and the records: of step 0, before the first update,
      and of each step after its update.

    Raises:
      ValueError: the folder has a run that was started with other options, or a step needs more
        memory than there is.
    """
    mesh, at_once = task.mesh, task.mesh.shape["data"] * task.batch
    trainer = make_trainer(recipe, task.structure, task.shapes, mesh)
    abstract = trainer.abstract

    def rows_at(step: int) -> Rows:
        rows = rows_of_step(len(task.rows.tokens), count=at_once, seed=recipe.seed, step=step)
        return place(task.rows, rows, mesh)

    # With the gradient, which every step has beside the state.
    least = budget.bytes_of_arrays((abstract, abstract.params))
    budget.check_memory(least, mesh)
    take_step = compiled_step(trainer, rows_at(0))
    on_start(f"a step {budget.check_memory(budget.bytes_of_step(take_step, least), mesh)}")
    evaluate = evaluator(task.structure, task.held_out, at_once, mesh)
    folder = folder.absolute()
    # Saving is synchronous, since the next step donates the buffers that are saved.
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / CHECKPOINTS, options=options) as snapshots:
        done = snapshots.latest_step() or 0
        facts = task.facts(recipe)
        if done:
            check_facts(folder / FACTS, facts)
            state = snapshots.restore(done, args=ocp.args.StandardRestore(abstract))
        else:
            if jax.process_index() == 0:
                (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n")
            state = trainer.start(task.load())
        # A process that was killed took later steps, which are taken again.
        records = [r for r in read_records(folder / METRICS) if done and r["step"] <= done]
        if not done:
            records.append({"step": 0, "evaluation_loss": evaluate(state.params)})
        _write_records(folder, records)
        for step in range(done, recipe.steps):
            begin = time.perf_counter()
            # Without this wait, several steps in flight on virtual CPU devices would compete for
            # the few threads that their collectives need.
            state, metrics = jax.block_until_ready(take_step(state, rows_at(step)))
            record: Record = {"step": step + 1, "seconds": time.perf_counter() - begin}
            record["bytes"] = trainer.bytes_sent
            record |= {name: float(value) for name, value in metrics.items()}
            last = step + 1 == recipe.steps
            if last or (step + 1) % EVALUATE_EVERY == 0:
                record["evaluation_loss"] = evaluate(state.params)
            records.append(record)
            _write_records(folder, [record], mode="a")
            if last or (step + 1) % save_every == 0:
                snapshots.save(step + 1, args=ocp.args.StandardSave(state))
            on_step(record)
    return state.params, records


def compiled_step(trainer: Trainer, rows: Rows) -> jax.stages.Compiled:
    """Compile the train step before the weights are read, to know the memory that it takes."""
    return trainer.step.lower(trainer.abstract, rows).compile()


def read_records(path: Path) -> list[Record]:
    """Read the records of a file, none if there is no file."""
    lines = path.read_text().splitlines(True) if path.exists() else []
    # A process that was killed may have left its last line unfinished.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _write_records(folder: Path, records: list[Record], mode: str = "w") -> None:
    """Write records, one on a line. Of several processes, the first one writes."""
    if jax.process_index() == 0:
        with (folder / METRICS).open(mode) as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


def check_facts(path: Path, facts: Record, remedy: str = REMEDY) -> None:
    """Raise ValueError, which ends with a remedy, if an earlier run depends on something else."""
    before = read_object(path, remedy)
    changed = [key for key in before | facts if before.get(key) != facts.get(key)]
    if changed:
        changes = ", ".join(f"{key} {before.get(key)!r}, now {facts.get(key)!r}" for key in changed)
        raise ValueError(f"The run in {path.parent} was started with {changes}. {remedy}")
