"""Results in JSON files, with the environment and the options of their measurement.

This module imports only what the library needs, as benchmarks run on machines without more.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamiq_jax._console.environment import environment


def keep(command: Any, device: str, results: Any, **facts: Any) -> None:
    """Write results of a command to its file, where `--json` gives one.

    `device` is the kind of the devices that were measured, and facts are those of their machine.
    """
    if command.json is not None:
        where = environment(device) | facts
        write(command.json, where, dataclasses.asdict(command), results)


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
