"""Compile time of `pmean` of a tree of 100 leaves on 8 and 64 virtual CPU devices, exact against
compressed, in one bucket and in several. Seconds are those of a core.

    python -m benchmarks.speed.compile_time
"""

import dataclasses
import json
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AxisType, PartitionSpec
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common


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
            options = dq.Options(bucket_bytes=bucket_bytes, bucketing=bucketing)
            return dq.pmean(own, "data", key=key, options=options)

        return mean

    def seconds(function):
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(PartitionSpec("data"), PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        start = time.process_time()
        jax.jit(mapped).lower(tree, jax.random.key(0)).compile()
        return time.process_time() - start

    seconds(exact)  # the first program pays for what all of them need
    return {
        "exact": seconds(exact),
        "compressed": {
            "1 bucket": seconds(compressed(1)),
            f"{buckets} striped": seconds(compressed(buckets)),
            f"{buckets} in order": seconds(compressed(buckets, "in_order")),
        },
    }


def main(config: Config) -> None:
    """Measure each number of workers in a process of its own."""
    console = Console()
    results = []
    for workers in config.workers:
        shape = f"{workers}, {config.leaves}, {config.leaf_size}, {config.buckets}"
        call = f"compile_time.compile_seconds({shape})"
        code = f"import json; from benchmarks import compile_time; print(json.dumps({call}))"
        output = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=common.RESULTS.parents[1],
        ).stdout
        results.append({"workers": workers} | json.loads(output))
    table = Table(
        title=f"Trace, lower and compile: pmean of {config.leaves} leaves of {config.leaf_size} f32"
    )
    for heading in ("workers", "exact, s", *(f"{kind}, s" for kind in results[0]["compressed"])):
        table.add_column(heading, justify="right")
    for row in results:
        times = (row["exact"], *row["compressed"].values())
        table.add_row(str(row["workers"]), *(f"{time:.2f}" for time in times))
    console.print(table)
    if config.save:
        console.print(
            f"Written to {common.save('compile_time', dataclasses.asdict(config), results)}"
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
