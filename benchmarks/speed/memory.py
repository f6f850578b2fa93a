"""New pages and CPU seconds of an all-reduce on CPU devices, by what becomes of freed memory.

    python -m benchmarks.speed.memory

Pages are counted by the system, and neither they nor CPU seconds depend much on other work. Each
case has a process of its own: with memory that is kept by `dq.keep_memory`, or not, and with a
gradient that is donated to the program, or not.
"""

import dataclasses
import itertools
import resource
import statistics
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from dynamiq_jax._measurement.all_reduce import make_gradients
from dynamiq_jax._measurement.devices import AXIS, make_mesh
from dynamiq_jax._measurement.settings import parse_setting


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: int = 8 * 2**20  # float32 coordinates of every worker
    workers: tuple[int, ...] = (2, 4)  # virtual devices
    settings: tuple[str, ...] = (
        "psum",
        "bf16:ring",
        "mxfp8:ring",
        "dynamiq:5:ring:implementation=xla",
        "dynamiq:5:ring",
    )
    warm: int = 5  # calls that do not count
    repeats: int = 10  # calls of which the medians count
    save: bool = True  # write the result to benchmarks/results/memory.json


COLUMNS = (
    Column("setting", "setting"),
    Column("workers", "workers"),
    Column("donated", "donated"),
    Column("memory kept", "kept"),
    Column("new pages, MiB a worker", "new_mib", "{:.1f}"),
    Column("CPU ms a worker, user", "user_ms", "{:.1f}"),
    Column("system", "system_ms", "{:.1f}"),
    Column("temporary arrays, MiB", "temporary_mib", "{:.1f}"),
)


@benchmark("memory")
def main(config: Config) -> Report:
    """Measure every case."""
    cases = list(itertools.product(config.workers, (False, True), config.settings, (False, True)))
    results = [
        {"setting": setting, "workers": workers, "donated": donated, "kept": kept}
        | in_process(
            measure, setting, workers, donated, kept, config.size, config.warm, config.repeats
        )
        for workers, donated, setting, kept in track(cases, "memory")
    ]
    title = f"{config.size / 2**20:g} Mi float32 coordinates"
    return Report(results=results, shown=[table(title, COLUMNS, results)])


def measure(
    setting: str, workers: int, donated: bool, kept: bool, size: int, warm: int, repeats: int
) -> dict[str, Any]:
    """Return what a call takes: new pages, and CPU milliseconds by who spends them.

    Args:
      setting: the all-reduce.
      workers: number of virtual devices.
      donated: whether the program may write results over the gradients.
      kept: whether memory is kept.
      size: coordinates of every worker.
      warm: calls that do not count.
      repeats: calls that count.
    """
    if kept and not dq.keep_memory():
        raise RuntimeError("kept: this C library cannot keep memory. Measure with glibc.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", workers)
    mesh = make_mesh(jax.devices())
    gradients = make_gradients(mesh, size, seed=0)
    method = parse_setting(setting)

    def reduce(gradient: jax.Array, seed: jax.Array) -> jax.Array:
        return method.all_reduce(gradient[0], AXIS, jax.random.key(seed))[None]

    mapped = jax.shard_map(
        reduce, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS), check_vma=False
    )
    donate = (0,) if donated else ()
    compiled = jax.jit(mapped, donate_argnums=donate).lower(gradients, np.uint32(0)).compile()
    taken = []
    for call in range(warm + repeats):
        before = resource.getrusage(resource.RUSAGE_SELF)
        result = jax.block_until_ready(compiled(gradients, np.uint32(call)))
        after = resource.getrusage(resource.RUSAGE_SELF)
        taken.append(
            (
                (after.ru_minflt - before.ru_minflt) * resource.getpagesize() / 2**20,
                1e3 * (after.ru_utime - before.ru_utime),
                1e3 * (after.ru_stime - before.ru_stime),
            )
        )
        if donated:
            gradients = result
    medians = (statistics.median(of) / workers for of in zip(*taken[warm:], strict=True))
    memory = compiled.memory_analysis()
    temporary = memory.temp_size_in_bytes / 2**20
    names = ("new_mib", "user_ms", "system_ms")
    return dict(zip(names, medians, strict=True)) | {"temporary_mib": temporary}


if __name__ == "__main__":
    run(main, __doc__)
