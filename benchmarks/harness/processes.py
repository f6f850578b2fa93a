"""Calls in a process of their own, for a device count, an environment or caches of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from benchmarks.harness.files import RESULTS

_CODE = """
import importlib, json, sys
module, name, arguments = sys.argv[1:]
result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
print("\\n" + json.dumps(result))
"""


def in_process(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> Any:
    """Call a function in a new process, and return its result.

    Args:
      function: function at the top of a module.
      arguments: values that JSON has, which also turns tuples into lists.
      environment: variables of the process, besides those of this one.
      python: interpreter of the process.

    Returns:
      The result, as JSON has it.

    Raises:
      RuntimeError: the call failed. The message has the end of what the process wrote.
    """
    module = function.__module__
    if module == "__main__":  # of the benchmark that runs
        module = cast(Any, sys.modules[module]).__spec__.name
    done = subprocess.run(
        [python, "-c", _CODE, module, function.__name__, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parents[1],
        env=os.environ | (environment or {}),
    )
    if done.returncode:
        raise RuntimeError(f"{function.__name__}{arguments} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])
