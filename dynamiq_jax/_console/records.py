"""Results in JSON files, with the environment and the options of their measurement.

This module imports only what the library needs, as benchmarks run on machines without more.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, environment: Mapping[str, Any], config: Mapping[str, Any], results: Any):
    """Write results with their environment, see `environment`, and the options of the run."""
    write_json(path, {"environment": environment, "config": config, "results": results})


def write_json(path: Path, content: Any) -> None:
    """Write numbers, texts and containers of them, with null for NaN and infinities."""
    path.write_text(json.dumps(_finite(content), indent=1, default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
