"""Weight files of a checkpoint folder: a single one, or those of an index."""

from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from examples.llm.json_files import COPY_AGAIN, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint.

    Args:
      folder: the checkpoint.

    Returns:
      Paths of files that exist, each once, sorted by name.

    Raises:
      FileNotFoundError: there are no weights, or a file of the index is missing.
      ValueError: the index is broken, or names a file outside of the folder.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}. {COPY_AGAIN}")
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
    """Return whether a name in an index is that of a file in the folder or in a subfolder."""
    if not isinstance(name, str) or "\0" in name or not PurePosixPath(name).name:
        return False
    # Refused on all systems if it would leave the folder on one of them.
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.anchor or ".." in path.parts:
            return False
    # The file itself may be a link, since download caches keep files elsewhere. Folders may not.
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())
