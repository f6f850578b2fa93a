"""Memory, disk and time that scripts of this folder need, known before they start."""

import contextlib
import ctypes
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

GIB = 2**30
# Of a CPU process: the libraries, what the compiler keeps, and a weight file that is being read.
REST_OF_PROCESS = 5 * GIB // 2
# Matrix products take about two thirds of the gradients on CPUs.
SHARE_OF_PRODUCTS = 2 / 3
# The sum of gradients and the optimizer take as long as so many copies of the parameters.
COPIES_OF_UPDATE = 4


def check_disk(folder: Path, needed: int) -> str:
    """Describe the room that a folder will take, and refuse one that cannot fit.

    Raises:
      ValueError: the disk of the folder has less room.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{folder} will take {needed / GIB:.1f} GiB, and its disk has {free / GIB:.1f} GiB "
            "free. Give a folder on another disk."
        )
    return f"{needed / GIB:.1f} GiB of disk"


def check_host_memory(name: str, needed: int) -> None:
    """Refuse something that the memory of this machine cannot hold.

    Raises:
      ValueError: less memory is free.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise ValueError(
            f"{name} takes {needed / GIB:.1f} GiB of memory, and this machine has "
            f"{free / GIB:.1f} GiB free. Give a smaller model, or use another machine."
        )


def check_memory(needed: int, mesh: Mesh) -> str:
    """Describe the memory that a step needs, and refuse one that cannot fit.

    Args:
      needed: bytes of each device.
      mesh: the devices.

    Raises:
      ValueError: the devices of this process have less memory.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":  # Virtual devices share the memory of the machine.
        where, free = "this machine", free_memory()
        needed = needed * len(mesh.local_devices) + REST_OF_PROCESS
    else:
        where, free = device.device_kind, (device.memory_stats() or {}).get("bytes_limit")
    text = f"needs {needed / GIB:.1f} GiB of memory"
    if free is not None and needed > free:
        raise ValueError(
            f"A step with --workers {mesh.shape['data']} {text}, and {where} has "
            f"{free / GIB:.1f} GiB free. Give fewer --workers, less --context or less --batch."
        )
    return text if free is None else f"{text}; {where} has {free / GIB:.1f} GiB free"


def bytes_of_arrays(tree: Any) -> int:
    """Count the bytes that arrays, or their shapes and shardings, take on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)


def bytes_of_step(step: jax.stages.Compiled, least: int) -> int:
    """Count the bytes that a compiled step takes on one device.

    Args:
      step: the step.
      least: bytes of its arrays, which are returned if the platform does not tell more.
    """
    sizes = step.memory_analysis()
    if sizes is None:
        return least
    fresh = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + fresh


def give_back_memory() -> None:
    """Give freed memory of this process back to the system: glibc keeps gigabytes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def free_memory() -> int | None:
    """Return the bytes that this process can still take, None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    limits = [] if kib is None else [1024 * int(kib)]
    group = Path("/sys/fs/cgroup")  # of a container, whose limit may be lower
    try:
        most = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        most = "max"
    if most != "max":
        limits.append(int(most) - used)
    return min(limits, default=None)


def seconds_of_training(params: Any, tokens: float, updates: int) -> float:
    """Estimate the time that steps compute on CPUs, from those of a product and of a copy.

    Args:
      params: the parameters, or their shapes.
      tokens: those of all workers and steps.
      updates: steps times workers, each of which updates all parameters.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    square, row = jnp.ones((1024, 1024)), jnp.ones(2**24)
    # Each parameter is multiplied once in the forward pass, and twice in the backward pass.
    products = 3 * count * tokens / 1024**3 * _seconds_of(jnp.matmul, square, square)
    copies = COPIES_OF_UPDATE * count * updates / row.size * _seconds_of(jnp.negative, row)
    return products / SHARE_OF_PRODUCTS + copies


def _seconds_of(function: Callable[..., Any], *args: Any) -> float:
    compiled = jax.jit(function).lower(*args).compile()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[2]
