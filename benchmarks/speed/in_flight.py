"""Count how often two collectives at once hang two processes on CPUs, by the way they are called.

    python -m benchmarks.speed.in_flight
    python -m benchmarks.speed.in_flight --runs 2 --steps 50 --no-save

Each run starts two processes with two devices each, which take some steps. A run that has not ended
after `--patience` seconds hangs. "in one function" is how the library chains calls; in the other
cases it cannot see that there are two collectives.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from rich.progress import track

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from tests.support.processes import free_port

PROCESSES, DEVICES, SIZE = 2, 2, 32768
WAYS = (
    "in one function",
    "beside lax.pmean",
    "in two scans",
    "in two programs",
    "in two programs, each waited for",
    "lax.pmean, in two programs",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    runs: int = 10  # of each way
    steps: int = 200  # of a run
    patience: float = 60.0  # seconds after which a run hangs
    save: bool = True  # write the result to benchmarks/results/in_flight.json


@benchmark("in_flight")
def main(options: Config) -> Report:
    """Count the runs that hang, and those with wrong values."""
    results: dict[str, dict[str, Any]] = {way: {"hangs": 0, "wrong": 0} for way in WAYS}
    for way in track([way for way in WAYS for _ in range(options.runs)], "runs"):
        ended = has_ended_well(way, options)
        results[way]["hangs"] += ended is None
        results[way]["wrong"] += ended is False
    columns = (Column("way", "way"), Column("hangs", "hangs"), Column("wrong", "wrong"))
    rows = [{"way": way} | counts for way, counts in results.items()]
    return Report(results=results, shown=[table(f"{options.runs} runs", columns, rows)])


def has_ended_well(way: str, options: Config) -> bool | None:
    """Return whether all processes ended with the right values; None if they hang."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.speed.in_flight", "--worker"]
    started = [
        subprocess.Popen(
            [*command, str(port), str(rank), way, str(options.steps)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(PROCESSES)
    ]
    deadline = time.monotonic() + options.patience
    try:
        codes = [each.wait(max(0.1, deadline - time.monotonic())) for each in started]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for each in started:
            each.kill()
            each.wait()
    return codes == [0] * PROCESSES


def worker(port: str, rank: str, way: str, steps: str) -> None:
    """Take the steps, in a process of its own, and end it with 1 if a result is wrong."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, int(rank))
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import dynamiq_jax as dq

    mesh = Mesh(np.array(jax.devices()), ("data",))
    ones = np.ones((PROCESSES * DEVICES, SIZE), np.float32)
    values = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, P("data")), lambda index: ones[index]
    )

    def compressed(x: jax.Array, number: int, step: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(number), step)
        return dq.pmean((number + 1) * x, "data", key=key)

    def exact(x: jax.Array, number: int, step: jax.Array) -> jax.Array:
        return jax.lax.pmean((number + 1) * x + 0 * step, "data")

    def scanned(x: jax.Array, number: int, step: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda _, y: (None, compressed(y, number, step)), None, x[None])[1][0]

    def on_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False
            )
        )

    pair = {"beside lax.pmean": (compressed, exact), "in two scans": (scanned, scanned)}
    first, second = pair.get(way, (exact, exact) if "lax" in way else (compressed, compressed))
    both = on_mesh(lambda x, step: (first(x, 0, step), second(x, 1, step)))
    apart = [on_mesh(lambda x, step, n=n: (first, second)[n](x, n, step)) for n in range(2)]
    for number in range(int(steps)):
        step = jnp.int32(number)
        if "two programs" not in way:
            results = both(values, step)
        elif "waited" in way:
            results = [jax.block_until_ready(program(values, step)) for program in apart]
        else:
            results = [program(values, step) for program in apart]
        means = [float(np.asarray(each.addressable_data(0)).mean()) for each in results]
        if not np.allclose(means, [1, 2], rtol=0.05):
            os._exit(1)
    # A process that ends closes connections that the other one may still read from.
    jax.distributed.shutdown()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        run(main, __doc__)
