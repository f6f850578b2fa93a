"""List the weight files of a checkpoint folder: a single one, or those of an index."""

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from examples.llm.json_files import COPY_AGAIN, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """List the files of safetensors in a checkpoint folder.

    Args:
      folder: the checkpoint.

    Returns:
      Paths of files that exist, each once, sorted by name.

    Raises:
      FileNotFoundError: the folder has no weights, or lacks a file that its index names.
      ValueError: the index is broken, or names a file outside of the folder.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}.")
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(
            f'{index} has "weight_map" {where!r:.80} instead of an object with the file of each '
            f"tensor. {COPY_AGAIN}"
        )
    for name in where.values():
        if not _is_inside(folder, name):
            raise ValueError(
                f"{index} names the file {name!r}, which is not inside of {folder}. Give names "
                "relative to the folder, without '..'."
            )
    files = [folder / name for name in sorted(set(where.values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing. {COPY_AGAIN}")
    return files


def _is_inside(folder: Path, name: Any) -> bool:
    """Tell whether a name in an index means a file in the folder or in one of its subfolders."""
    if not isinstance(name, str) or "\0" in name or not PurePosixPath(name).name:
        return False
    # A checkpoint is refused on every system if it would be on one.
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.anchor or ".." in path.parts:
            return False
    # The file itself may be a link: download caches keep the bytes elsewhere. Folders may not.
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())
