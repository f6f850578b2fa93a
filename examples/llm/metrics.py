"""Records of a run: one line of JSON per step, and TensorBoard files if tensorboardX is there."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import jax

Record = dict[str, Any]


class Metrics:
    """The records of a run, at most one per step. Of several processes, the first one writes."""

    def __init__(self, folder: Path, *, steps: int):
        """Open the records of a run that resumes after `steps` steps.

        Records of later steps are removed. A process that was killed took these steps after its
        last checkpoint, and they are taken again.
        """
        self.path = folder / "metrics.jsonl"
        self.records = [record for record in read(self.path) if record["step"] <= steps]
        self._file = self._board = None
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / "metrics.jsonl.partial"
            partial.write_text("".join(map(_line, self.records)))
            partial.replace(self.path)
            self._file = self.path.open("a")
            if importlib.util.find_spec("tensorboardX") is not None:
                from tensorboardX import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=steps + 1)

    def append(self, record: Record) -> None:
        """Add the record of a step, which readers of the file see at once."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(_line(record))
            self._file.flush()
        if self._board is not None:
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, record["step"])

    def sync(self) -> None:
        """Write all records to disk, so that they survive a crash of the machine."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[Record]:
    """Read the records of a file, none if there is no file."""
    if not path.exists():
        return []
    # A process that was killed may have left its last line unfinished.
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"
