"""Checkpoints of a run, from which the same command resumes bit-identically.

Orbax writes a checkpoint under another name and renames it when it is complete. A process may be
killed at any moment: every checkpoint in the folder is whole.
"""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from examples.llm.errors import RunError
from examples.llm.json_files import read_object

Facts = dict[str, Any]


class Snapshots:
    """The last two checkpoints of a run."""

    def __init__(self, folder: Path, facts: Facts):
        """Open the checkpoints in a folder, and write `facts` beside them.

        Args:
          folder: folder of the run.
          facts: everything that the losses of the run depend on, as JSON.

        Raises:
          RunError: the checkpoints belong to a run with other facts, or facts that cannot be read.
        """
        self.folder = folder.absolute()
        # Saving is synchronous, since the next step donates the buffers that are saved.
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder / "checkpoints", options=options)
        self.step = self._manager.latest_step() or 0
        path = self.folder / "run.json"
        if self.step:
            try:
                before = read_object(path, "Give --restart or another --output-dir.")
            except (ValueError, FileNotFoundError) as problem:
                raise RunError(str(problem)) from None
            _check_same(before, facts, folder)
        elif jax.process_index() == 0:
            partial = self.folder / "run.json.partial"
            partial.write_text(json.dumps(facts, indent=2) + "\n")
            partial.replace(path)

    def save(self, step: int, state: Any) -> None:
        """Save the state after `step` steps, and return when it is on disk."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, abstract: Any) -> Any:
        """Restore the last state, with the given shapes, dtypes and shardings."""
        return self._manager.restore(self.step, args=ocp.args.StandardRestore(abstract))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._manager.close()


def forget(folder: Path) -> None:
    """Delete the checkpoints and records of a run, and nothing else in its folder.

    All processes call this, and return when it is done.
    """
    if jax.process_index() == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        for name in ("run.json", "metrics.jsonl"):
            (folder / name).unlink(missing_ok=True)
    multihost_utils.sync_global_devices("forgotten")


def _check_same(before: Facts, now: Facts, folder: Path) -> None:
    """Raise RunError if a run would resume with other facts than it was started with."""
    changed = sorted(key for key in before | now if before.get(key) != now.get(key))
    remedy = "Give the same options, or --restart, or another --output-dir."
    if "workers" in changed:
        raise RunError(
            f"--workers is {now['workers']}, but the run in {folder} was started with "
            f"{before.get('workers')}. The batch, the rounding noise and the residuals depend on "
            f"the number of workers. {remedy}"
        )
    if changed:
        changes = ", ".join(f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
        raise RunError(f"The run in {folder} was started with {changes}. {remedy}")
