"""Hardware, versions and date, which are kept with every result.

This module imports only what the library needs, as benchmarks run on machines without more.
"""

import datetime
import platform
from typing import Any

import jax
import jaxlib
import numpy as np

import dynamiq_jax
from dynamiq_jax._api.keep_memory import memory_is_kept
from dynamiq_jax._console.machine import cpu_name, num_cores, num_threads
from pallas_kernels import operations


def environment(device: str) -> dict[str, Any]:
    """Describe this machine and its software.

    Args:
      device: kind of the devices that were measured.

    Returns:
      Hardware, versions and date, as strings and numbers.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "dynamiq_jax": dynamiq_jax.__version__,
        "device": device,
        "cpu": cpu_name(),
        "cores": num_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": np.__version__,
    }


def of_cpu_programs() -> dict[str, Any]:
    """Describe what the speed of programs on CPU devices of this process depends on.

    Returns:
      Threads of XLA, whether memory is kept between calls, and the line that names the codec. The
      first call may check the codec, which takes a second.
    """
    return {
        "threads": num_threads(),
        "memory_kept": memory_is_kept(),
        "codec": operations.default_backend(),
    }
