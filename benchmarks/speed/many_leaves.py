"""Trace, lower and compile time, memory and step time of `pmean` of trees of many leaves, beside
`lax.pmean` of the same trees. Compile times are those of a core.

    python -m benchmarks.speed.many_leaves

Each program is compiled in a process of its own. Large trees take long: `--leaves 10 300` is a
short run.
"""

import dataclasses
import math
import resource
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from benchmarks.harness import timing
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process

# A decoder layer: attention, an MLP, and vectors that stay exact.
LAYER = [(128, 128)] * 4 + [(128, 512), (512, 128), (128,), (128,), (512,), (128,)]
SHAPES = {"mixed": LAYER, "small": [(128,)], "large": [(128, 128)]}
FUNCTIONS = ("exact", "compressed")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    kinds: tuple[str, ...] = tuple(SHAPES)  # layers of a decoder, vectors, or matrices alone
    leaves: tuple[int, ...] = (10, 300, 3_000)  # of each tree
    traced: tuple[int, ...] = (20_000,)  # leaves of trees that are traced, and not compiled
    workers: int = 4  # virtual devices
    steps: int = 7  # of which the median counts
    save: bool = True  # write the result to benchmarks/results/many_leaves.json


def measure(
    kind: str, leaves: int, function: str, workers: int, steps: int, compiles: bool
) -> dict[str, float]:
    """Return CPU seconds of each stage, bytes of a device, peak bytes of the process, and seconds
    of a step.

    Args:
      kind: of shapes.
      leaves: of the tree; as many coordinates in one leaf if the function is "one bucket".
      function: "exact", "compressed" or "one bucket".
      workers: virtual devices.
      steps: of which the median counts.
      compiles: whether the tree is more than traced.
    """
    jax.config.update("jax_num_cpu_devices", workers)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    shapes = [SHAPES[kind][number % len(SHAPES[kind])] for number in range(leaves)]
    if function == "one bucket":
        shapes = [(sum(map(math.prod, shapes)) // 128, 128)]

    def mean(tree, key):
        own = jax.tree.map(lambda leaf: leaf[0], tree)
        if function == "exact":
            return jax.lax.pmean(own, "data")
        return dq.pmean(own, "data", key=key)

    data, key = PartitionSpec("data"), jax.random.key(0)
    mapped = jax.shard_map(
        mean, mesh=mesh, in_specs=(data, PartitionSpec()), out_specs=PartitionSpec()
    )

    def described(shapes):
        return [jax.ShapeDtypeStruct((workers, *shape), np.float32) for shape in shapes]

    result = {}

    def timed(stage, call):
        value, result[stage] = timing.timed(call, time.process_time)
        return value

    # The first program pays for what all of them need. It is none of those that are measured.
    jax.jit(mapped).lower(described([(24, 128)]), key).compile()
    traced = timed("trace", lambda: jax.jit(mapped).trace(described(shapes), key))
    if not compiles:
        return result
    lowered = timed("lower", traced.lower)
    compiled = timed("compile", lowered.compile)
    memory = compiled.memory_analysis()
    result["bytes"] = sum(
        getattr(memory, f"{part}_size_in_bytes") for part in ("argument", "output", "temp")
    )
    rng = np.random.default_rng(0)
    tree = [rng.standard_normal((workers, *shape), np.float32) for shape in shapes]
    tree = jax.device_put(tree, NamedSharding(mesh, data))
    result["step"] = timing.median_seconds(compiled, tree, key, repeats=steps)
    result["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result


def column_of(stage: str, heading: str) -> Column:
    """Make the column of a stage: numbers of all functions, as far as they have it."""
    unit, digits = (1e6, 0) if stage in ("bytes", "peak") else (1, 2)

    def cell(row: dict[str, Any]) -> str:
        values = [of[stage] / unit for of in row.values() if isinstance(of, dict) and stage in of]
        return ", ".join(f"{value:.{digits}f}" for value in values)

    return Column(heading, cell)


COLUMNS = (
    Column("leaves", lambda row: f"{row['leaves']} {row['kind']}"),
    column_of("trace", "trace, s"),
    column_of("lower", "lower, s"),
    column_of("compile", "compile, s"),
    column_of("bytes", "MB"),
    column_of("peak", "peak, MB"),
    column_of("step", "step, s"),
)


@benchmark("many_leaves")
def main(config: Config) -> Iterator[Report]:
    """Measure all cases; report after each tree, since all of them take long."""
    title = f"pmean on {config.workers} virtual devices: lax, dq, dq of one leaf"
    results: list[dict[str, Any]] = []
    for kind in config.kinds:
        for leaves in (*config.leaves, *config.traced):
            compiles = leaves in config.leaves
            functions = (*FUNCTIONS, "one bucket") if compiles and kind != "small" else FUNCTIONS
            of = {
                function: in_process(
                    measure, kind, leaves, function, config.workers, config.steps, compiles
                )
                for function in functions
            }
            results.append({"kind": kind, "leaves": leaves} | of)
            yield Report(results=results, shown=[table(title, COLUMNS, results)])


if __name__ == "__main__":
    run(main, __doc__)
