"""Sections `device` and `prediction`: the copy bandwidth of the device, and the times that follow
from it.
"""

import math
import shutil
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import h200_model as h200
from benchmarks.gpu.bench import GpuBench, Program
from benchmarks.gpu.jobs import floor_bytes
from benchmarks.gpu.record import Results
from benchmarks.gpu.report import matching
from benchmarks.harness.batches import copy_speed
from benchmarks.harness.operations import STEPS


def facts() -> dict[str, Any]:
    """Describe the GPU by nvidia-smi, if it is there; it is only asked."""
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


def measure(bench: GpuBench, results: Results) -> None:
    """Measure yardsticks for all other sections: a copy, and what starting a call takes."""
    with bench.record.guard("copy"):
        speed = copy_speed(bench.options.copy_bytes, bench.batches)
        results["copy_bytes_per_second"] = bench.copy_bytes_per_second = speed
    key, few = ("launch", "tiny"), jnp.arange(8, dtype=jnp.uint32)
    programs: dict[Any, Program] = {key: (lambda x: x + np.uint32(1), [few])}
    bench.compile_all(programs)
    if (timing := bench.measure(key, [[few]])) is not None:
        results["launch_us"] = timing["us"]
    print(
        f"copy of {bench.options.copy_bytes / 2**30:g} GiB: "
        f"{bench.copy_bytes_per_second / 1e9:.0f} GB/s read and written; starting a call: "
        f"{results.get('launch_us', math.nan):.1f} us"
    )


def predict(bench: GpuBench, results: Results) -> None:
    """Predict the times of the kernels, at the size and bits that matter most, from their bytes and
    instructions, and compare with those that were measured.
    """
    options = bench.options
    size, bits = options.sizes[0], options.bits[0]
    layout = options.method(bits).layout(size, num_chunks=1)
    multiprocessors = getattr(jax.devices()[0], "core_count", None) or h200.MULTIPROCESSORS
    known = bench.record.environment.get("clock_max_mhz")
    clock = options.clock_mhz or known or h200.CLOCK_GHZ * 1000
    # Every scheduler starts one instruction of a warp each clock.
    lanes_per_second = multiprocessors * h200.SCHEDULERS * h200.LANES * clock * 1e6
    results |= {"multiprocessors": multiprocessors, "clock_mhz": clock}
    print(f"{multiprocessors} multiprocessors, {clock:g} MHz; {bits:g} bits; ps per coordinate")
    for dtype in options.dtypes:
        for operation in STEPS:
            moved = floor_bytes(operation, "triton", layout, dtype)
            times = {"memory": moved / bench.copy_bytes_per_second * 1e12}
            if operation == "hop":  # the one whose instructions are counted
                times["issue"] = options.instructions_per_coordinate / lanes_per_second * 1e12
            bound = max(times, key=lambda name: times[name])
            timed = matching(
                bench.rows, operation=operation, implementation="triton", dtype=dtype, size=size
            )
            measured = timed[0]["ps_per_coordinate"] if timed else math.nan
            result = results[f"{dtype} {operation}"] = {
                "bytes": moved,
                "ps": times,
                "bound": bound,
                "measured_ps": measured,
                "measured_over_predicted": measured / times[bound],
            }
            if operation == "hop":
                # What the measured time would hold if nothing but starting instructions took it.
                result["issue_slots_in_measured_time"] = measured * 1e-12 * lanes_per_second
            print(
                f"{dtype:>9} {operation:<10} {moved:.3f} B: "
                + ", ".join(f"{name} {ps:.2f}" for name, ps in times.items())
                + f" -> {bound}; measured {measured:.2f} = {measured / times[bound]:.2f} x"
            )
