"""Section `prediction`. Paper first: what bytes and instructions would take, beside what was
measured.
"""

import math

import jax

from benchmarks import h200
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.operations import KERNELS
from benchmarks.gpu.record import Results
from benchmarks.gpu.rows import matching
from benchmarks.gpu.traffic import floor_bytes


def predict(bench: Bench, results: Results) -> None:
    """The kernels at the size and bits that matter most."""
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
        for operation in KERNELS:
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
