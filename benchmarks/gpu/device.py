"""The device: what nvidia-smi says of it, its copy bandwidth, and what starting a call costs."""

import math
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.bench import Bench, Program
from benchmarks.gpu.record import Results


def facts() -> dict[str, Any]:
    """What nvidia-smi says, if it is there; it is only asked."""
    fields = "name,driver_version,clocks.max.sm,memory.total,power.limit"
    if jax.default_backend() != "gpu" or shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        first = answer.stdout.splitlines()[0]
        name, driver, clock, memory, power = (value.strip() for value in first.split(","))
        return {
            "gpu": name,
            "driver": driver,
            "memory_mib": memory,
            "power_limit_w": power,
            "clock_max_mhz": float(clock),
        }
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return {}


def measure(bench: Bench, results: Results) -> None:
    """Section `device`: yardsticks for all others."""
    words = jnp.arange(bench.options.copy_bytes // 4, dtype=jnp.uint32)
    programs: dict[Any, Program] = {
        ("copy", "xor"): (lambda x: x ^ np.uint32(1), [words]),
        ("copy", "jnp.copy"): (jnp.copy, [words]),
        ("launch", "tiny"): (lambda x: x + np.uint32(1), [words[:8]]),
    }
    bench.compile_all(programs)
    for key, (_, args) in programs.items():
        timing = bench.measure(key, [args])
        if timing is None:
            continue
        if key[0] == "launch":
            results["launch_us"] = timing["us"]
            continue
        speed = 2 * words.nbytes / timing["us"] * 1e6
        results[key[1]] = timing | {"bytes_per_second": speed}
        results["copy_bytes_per_second"] = max(speed, results.get("copy_bytes_per_second", 0))
        bench.copy_bytes_per_second = results["copy_bytes_per_second"]
    print(
        f"copy of {words.nbytes / 2**30:g} GiB: {bench.copy_bytes_per_second / 1e9:.0f} GB/s read "
        f"and written; starting a call: {results.get('launch_us', math.nan):.1f} us"
    )
