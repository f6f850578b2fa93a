"""Trace, lower and compile time, memory and step time of `pmean` of trees of many leaves, beside
`lax.pmean` of the same trees. Compile times are those of a core.

    python -m benchmarks.speed.many_leaves

Each program is compiled in a process of its own. Large trees take long: `--leaves 10 300` is a
short run.
"""

import dataclasses
import json
import math
import resource
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import tyro
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common

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
        start = time.process_time()
        value = call()
        result[stage] = time.process_time() - start
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
    result["step"] = common.median_seconds(compiled, tree, key, repeats=steps)
    result["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result


def in_process(*case: Any) -> dict[str, float]:
    """Measure one case in a process of its own."""
    call = f"many_leaves.measure(*{case!r})"
    code = f"import json; from benchmarks.speed import many_leaves; print(json.dumps({call}))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=common.RESULTS.parents[1],
    ).stdout
    return json.loads(output)


def main(config: Config) -> None:
    """Measure all cases, and print a table."""
    console = Console()
    table = Table(title=f"pmean on {config.workers} virtual devices: lax, dq, dq of one leaf")
    for heading in ("leaves", "trace, s", "lower, s", "compile, s", "MB", "peak, MB", "step, s"):
        table.add_column(heading, justify="right")
    results = []
    for kind in config.kinds:
        for leaves in (*config.leaves, *config.traced):
            compiles = leaves in config.leaves
            functions = (*FUNCTIONS, "one bucket") if compiles and kind != "small" else FUNCTIONS
            of = {
                function: in_process(kind, leaves, function, config.workers, config.steps, compiles)
                for function in functions
            }
            results.append({"kind": kind, "leaves": leaves} | of)
            cells = []
            for stage in ("trace", "lower", "compile", "bytes", "peak", "step"):
                unit = 1e6 if stage in ("bytes", "peak") else 1
                digits = 0 if unit > 1 else 2
                values = [of[f][stage] / unit for f in functions if stage in of[f]]
                cells.append(", ".join(f"{value:.{digits}f}" for value in values))
            table.add_row(f"{leaves} {kind}", *cells)
            console.print(f"{leaves} {kind}: {', '.join(cells)}")
            if config.save:  # after each tree, since all of them take long
                common.save("many_leaves", dataclasses.asdict(config), results)
    console.print(table)
    if config.save:
        console.print(f"Written to {common.RESULTS / 'many_leaves.json'}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
