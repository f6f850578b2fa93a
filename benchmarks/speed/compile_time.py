"""Compile time of `pmean` of a tree of 100 leaves on 8 and 64 virtual CPU devices, exact against
compressed, in one bucket and in several. Seconds are those of a core.

    python -m benchmarks.speed.compile_time
"""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import dynamiq_jax as dq
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from benchmarks.harness.timing import timed


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workers: tuple[int, ...] = (8, 64)  # virtual devices, each number in a process of its own
    leaves: int = 100  # leaves of the tree
    leaf_size: int = 40_960  # coordinates of each
    buckets: int = 8  # in as many the tree is compressed, and in one
    save: bool = True  # write the result to benchmarks/results/compile_time.json


def compile_seconds(workers: int, leaves: int, leaf_size: int, buckets: int) -> dict[str, Any]:
    """Return the seconds from a function to an executable: of an exact mean, and of compressed ones
    by their buckets.
    """
    jax.config.update("jax_num_cpu_devices", workers)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    tree = {
        f"leaf{i}": jax.ShapeDtypeStruct((workers, leaf_size), jnp.float32) for i in range(leaves)
    }

    def exact(tree, key):
        return jax.lax.pmean(jax.tree.map(lambda leaf: leaf[0], tree), "data")

    def compressed(number, bucketing="auto"):
        bucket_bytes = 4 * leaf_size * -(-leaves // number)

        def mean(tree, key):
            own = jax.tree.map(lambda leaf: leaf[0], tree)
            options = dq.Compression(bucket_bytes=bucket_bytes, bucketing=bucketing)
            return dq.pmean(own, "data", key=key, method=options)

        return mean

    def seconds(function):
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec("data"), PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        lowering = jax.jit(mapped).lower
        return timed(lambda: lowering(tree, jax.random.key(0)).compile(), time.process_time)[1]

    seconds(exact)  # the first program pays for what all of them need
    return {
        "exact": seconds(exact),
        "compressed": {
            "1 bucket": seconds(compressed(1)),
            f"{buckets} striped": seconds(compressed(buckets)),
            f"{buckets} in order": seconds(compressed(buckets, "in_order")),
        },
    }


@benchmark("compile_time")
def main(config: Config) -> Report:
    """Measure each number of workers in a process of its own."""
    shape = (config.leaves, config.leaf_size, config.buckets)
    results = [
        {"workers": workers} | in_process(compile_seconds, workers, *shape)
        for workers in config.workers
    ]
    columns = [Column("workers", "workers"), Column("exact, s", "exact", "{:.2f}")]
    columns += [
        Column(f"{kind}, s", ("compressed", kind), "{:.2f}") for kind in results[0]["compressed"]
    ]
    title = f"Trace, lower and compile: pmean of {config.leaves} leaves of {config.leaf_size} f32"
    return Report(results=results, shown=[table(title, columns, results)])


if __name__ == "__main__":
    run(main, __doc__)
