"""Time of a step that `dq.compress` wraps, beside the same step with `dq.pmean` written by hand.

    python -m benchmarks.speed.compressed_step

A decoder of several layers trains with AdamW on virtual CPU devices. The three steps run in turns,
so that other work on the machine slows all of them. Trace and compile times are those of a core.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.harness import timing
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process

STEPS = ("exact", "by hand", "compressed")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    layers: tuple[int, ...] = (4, 16)  # of the model
    width: int = 256  # of a layer, a quarter of its inner width
    batch: int = 16  # rows of a worker
    workers: int = 4  # virtual devices
    turns: int = 25  # of which the median counts
    repeats: int = 3  # of the trace, of which the least counts
    save: bool = True  # write the result to benchmarks/results/compressed_step.json


def measure(
    layers: int, width: int, batch: int, workers: int, turns: int, repeats: int
) -> dict[str, Any]:
    """Return CPU seconds of each stage, messages, bytes, and seconds of a step, for each step.

    Args:
      layers: of the model.
      width: of a layer.
      batch: rows of a worker.
      workers: virtual devices.
      turns: in which each step runs once.
      repeats: of the trace, of which the least counts.
    """
    jax.config.update("jax_num_cpu_devices", workers)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    steps = {
        "exact": step_of(mesh, lambda grads, _: jax.lax.pmean(grads, "data")),
        "by hand": step_of(mesh, lambda grads, key: dq.pmean(grads, "data", key=key)),
    }
    steps["compressed"] = dq.compress(
        steps["exact"], "data", key=lambda params, state, rows, key: key
    )
    state = first_state(layers, width)
    rows = np.random.default_rng(0).standard_normal((workers * batch, width), np.float32)
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    arguments = jax.device_put(
        (*state, rows, jax.random.key(0)), (everywhere, everywhere, split, everywhere)
    )
    # The first step pays for what all of them need.
    for step in steps.values():
        jax.jit(step).lower(*jax.device_put((*first_state(1, width), rows, jax.random.key(0))))
    result: dict[str, Any] = {}
    compiled = {}
    for name, step in steps.items():
        seconds = []
        for _ in range(repeats):
            jax.clear_caches()
            traced, taken = timing.timed(
                functools.partial(jax.jit(step).trace, *arguments), time.process_time
            )
            seconds.append(taken)
        lowered = traced.lower()
        compiled[name], compile_seconds = timing.timed(lowered.compile, time.process_time)
        rows_sent = dq.inspect(jax.jit(step), *arguments).rows
        result[name] = {
            "trace": min(seconds),
            "compile": compile_seconds,
            "messages": sum(row.messages for row in rows_sent),
            "bytes": sum(row.bytes for row in rows_sent),
        }
    times = timing.in_turns(
        {name: functools.partial(each, *arguments) for name, each in compiled.items()}, turns
    )
    for name, of in times.items():
        result[name]["step"] = statistics.median(of)
        result[name]["of by hand"] = timing.median_ratio(of, times["by hand"])
    return result


def first_state(layers: int, width: int) -> tuple[Any, Any]:
    """Return the parameters of the model and the state of its optimizer."""
    params = [
        {
            "inner": jnp.full((width, 4 * width), 1 / width),
            "bias": jnp.zeros(4 * width),
            "outer": jnp.full((4 * width, width), 1 / width),
            "scale": jnp.ones(width),
        }
        for _ in range(layers)
    ]
    return params, optax.adamw(1e-3).init(params)


def step_of(mesh: jax.sharding.Mesh, mean: Callable[[Any, jax.Array], Any]) -> Callable[..., Any]:
    """Return a train step whose gradients are averaged by a function."""

    def loss_of(params: Any, rows: jax.Array) -> jax.Array:
        values = rows
        for layer in params:
            inner = jax.nn.gelu(values * layer["scale"] @ layer["inner"] + layer["bias"])
            values = values + inner @ layer["outer"]
        return jnp.mean((values - jnp.roll(rows, 1, axis=1)) ** 2)

    def local(params: Any, state: Any, rows: jax.Array, key: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, rows)
        grads = mean(grads, key)
        updates, state = optax.adamw(1e-3).update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "data")

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(), P("data"), P()), out_specs=P(), check_vma=False
    )


def column_of(name: str, heading: str, unit: float, digits: int) -> Column:
    """Make the column of a number: those of all steps."""

    def cell(row: dict[str, Any]) -> str:
        return ", ".join(f"{row[step][name] / unit:.{digits}f}" for step in STEPS)

    return Column(heading, cell)


COLUMNS = (
    Column("layers", "layers"),
    column_of("trace", "trace, s", 1, 2),
    column_of("compile", "compile, s", 1, 2),
    column_of("messages", "messages", 1, 0),
    column_of("bytes", "MB sent", 1e6, 2),
    column_of("step", "step, ms", 1e-3, 1),
    column_of("of by hand", "step, of that by hand", 1, 3),
)


@benchmark("compressed_step")
def main(config: Config) -> Report:
    """Measure models of several depths, each in a process of its own."""
    options = (config.width, config.batch, config.workers, config.turns, config.repeats)
    results = [
        {"layers": layers} | in_process(measure, layers, *options) for layers in config.layers
    ]
    title = f"A train step on {config.workers} virtual devices: {', '.join(STEPS)}"
    return Report(results=results, shown=[table(title, COLUMNS, results)])


if __name__ == "__main__":
    run(main, __doc__)
