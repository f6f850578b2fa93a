"""Where a run is: its state on disk, from which the same command goes on bit for bit.

Orbax writes a checkpoint under another name and renames it when it is complete, so that a process
may die at any moment: what is there is whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dynamiq_jax._workshop.errors import CommandError
from examples.llm.json_files import read_object

Facts = dict[str, Any]


class Snapshots:
    """The checkpoints of one run, the last two of them."""

    def __init__(self, folder: Path, facts: Facts):
        """Opens the checkpoints in a folder, where `facts` are written too.

        Args:
            folder: Of the run.
            facts: All that the losses of the run depend on, as JSON.

        Raises:
            CommandError: The folder has checkpoints of a run with other facts, or none that can
                be read.
        """
        self.folder = folder.absolute()
        # Saving waits until all is written: a step donates the buffers that would be read.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        self.step = self._manager.latest_step() or 0
        path = self.folder / "run.json"
        if self.step:
            try:
                before = read_object(path, "Give --restart or another --output-dir.")
            except (ValueError, FileNotFoundError) as problem:
                raise CommandError(str(problem)) from None
            _check_same(before, facts, folder)
        elif jax.process_index() == 0:
            partial = self.folder / "run.json.partial"
            partial.write_text(json.dumps(facts, indent=2) + "\n")
            partial.replace(path)

    def save(self, step: int, state: Any) -> None:
        """Saves the state after `step` steps, and returns when it is there."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: Any) -> Any:
        """The last state, of the given shapes, dtypes and shardings."""
        return self._manager.restore(self.step, args=ocp.args.StandardRestore(abstract))

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.close()


def forget(folder: Path) -> None:
    """Deletes what a run left in a folder, and nothing else. All processes call it, and go on when
    it is done.
    """
    if jax.process_index() == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in ("run.json", "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
    multihost_utils.sync_global_devices("forgotten")


def _check_same(before: Facts, now: Facts, folder: Path) -> None:
    """Refuses to go on with another run than the one that was begun."""
    other = sorted(key for key in before | now if before.get(key) != now.get(key))
    remedy = "Go on with what it was begun with, or give --restart or another --output-dir."
    if "workers" in other:
        raise CommandError(
            f"--workers is {now['workers']}, but the run in {folder} was begun with "
            f"{before.get('workers')}. Each worker has a share of the batch, and rounding or a "
            f"residual of its own, so that the run would become another one. {remedy}"
        )
    if other:
        changes = ", ".join(f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in other)
        raise CommandError(f"The run in {folder} was begun with {changes}. {remedy}")
