"""Read JSON objects from files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

COPY_AGAIN = "Copy or download the checkpoint again."


def read_object(path: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """Read the JSON object that a file holds.

    Args:
      path: the file.
      remedy: what to do if it is missing or broken, a sentence for the error.

    Returns:
      Its keys and values.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is no JSON, or holds something other than an object.
    """
    try:
        # Bytes: the parser finds out which UTF they are in.
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing. {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken JSON: {error}. {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object. {remedy}")
    return content
