"""Section `profiler`: the kernels that single calls start, and their own times by CUPTI, without
the host.
"""

import statistics
from typing import Any

import jax

from benchmarks.gpu.bench import GpuBench
from benchmarks.gpu.cases import GpuCase
from benchmarks.gpu.record import Results


def profile(bench: GpuBench, results: Results) -> None:
    """Profile all operations that were compiled so far, at the size and bits that matter most, on
    one set of inputs. A machine may not allow it.
    """
    if jax.default_backend() != "gpu":
        results["note"] = "no GPU to profile"
        return
    from jax.experimental.mosaic.gpu import profiler  # in CUDA builds of JAX only

    options = bench.options
    bits = options.bits[0]
    for size in options.sizes[:1]:
        for dtype in options.dtypes:
            case = GpuCase(bench, size, dtype, bits)
            label = f"{dtype} {size / 2**20:g} Mi {bits:g} bits"
            compiled = [job for job in case.jobs if case.key(job) in bench.executables]
            if ("hop", "triton") not in compiled or not bench.record.may_start(label):
                continue
            inputs = case.make_inputs()[0]
            for job in compiled:
                executable = bench.executables[case.key(job)]
                measured = profiler.measure(executable, aggregate=False, iterations=5)
                try:
                    calls = measured(*case.arguments(job, inputs))[1]
                    kernels = _summarize(calls)
                except Exception as error:  # many machines do not let a user profile
                    bench.record.skip("profiler", f"{type(error).__name__}: {str(error)[:500]}")
                    return
                total = sum(us for _, us in kernels)
                results[f"{label} {' '.join(job)}"] = {"us": total, "kernels": kernels}
                operation, implementation = job
                if implementation == "triton":
                    shown = ", ".join(f"{name[:32]} {us:.1f}" for name, us in kernels[:4])
                    print(f"{label} {operation}: {total:.1f} us: {shown}", flush=True)


def _summarize(iterations: Any) -> list[tuple[str, float]]:
    """Return the median microseconds of every kernel of a call, from the profiler's [(name, ms)] of
    calls.
    """
    names = [name for name, _ in iterations[0]]
    return [
        (name, 1e3 * statistics.median(call[index][1] for call in iterations))
        for index, name in enumerate(names)
    ]
