"""JSON objects in files, with errors that name the file."""

import json
from pathlib import Path
from typing import Any

COPY_AGAIN = "Copy or download the checkpoint again."


def read_object(path: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
      path: the file.
      remedy: sentence for errors: what to do if the file is missing or broken.

    Returns:
      Its keys and values.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is not JSON, or has something other than an object.
    """
    try:
        content = json.loads(path.read_bytes())  # which detects UTF-8, UTF-16 and UTF-32
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing. {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken JSON: {error}. {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, not a JSON object. {remedy}")
    return content
