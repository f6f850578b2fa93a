"""Cost of the rewriting of a global step: `dq.compress` with exact sums beside the jitted step.

    python -m benchmarks.speed.global_step

Steps run in turns on eight virtual devices, so that other work on the machine slows both alike, and
the jitted step runs against itself, for the noise of the ratio. The memory is that of a device, as
the compiler plans it: arguments, results and temporary arrays, where the state of the step before
is donated, as in a trainer, and where it is kept. A decoder of 300 arrays is compiled
in four ways, each in a process of its own: as it is, with exact sums, with 5 bits, and in a map
with `dq.pmean`. Trace and compile times are seconds of a core.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.harness import files, timing
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from benchmarks.training.global_decoder import OPTIMIZER, GlobalDecoder

SMALL = {"layers": 3, "width": 128, "vocabulary": 1024}
LARGE = {"layers": 33, "width": 64, "vocabulary": 256, "scan": False}  # 300 arrays
WAYS = ("jax.jit", "exact", "5 bits", "dq.pmean")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    turns: int = 25  # of which the median counts
    repeats: int = 5  # of the trace, of which the least counts
    save: bool = True  # write the result to benchmarks/results/global_step.json


def mesh_of(data: int, fsdp: int) -> Mesh:
    """Return a mesh of data x fsdp."""
    return jax.make_mesh((data, fsdp), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def drawn(shapes: Any) -> Any:
    """Return arrays of some shapes, where their shardings put them: small normal or whole ones."""
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            values = rng.integers(0, 256, leaf.shape) if leaf.shape else np.zeros(())
        else:
            values = rng.normal(0, 0.02, leaf.shape) + (len(leaf.shape) < 2)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(draw, shapes)


Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]


def decoder(mesh: Mesh, scan: bool = True) -> Made:
    """Return the step of a decoder, its state and its batch."""
    model = GlobalDecoder(**SMALL, scan=scan)  # type: ignore[arg-type]
    params, _, tokens = model.arguments(mesh, 32, 32)
    params = drawn(params)
    return jax.jit(model.step()), (params, OPTIMIZER.init(params)), (drawn(tokens),)


class ConvNet(nn.Module):
    """Convolutions with statistics of the batch."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return the logits of images."""
        for features in (32, 64, 128):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def convolutions(mesh: Mesh) -> Made:
    """Return the step of a network with batch norm, and its arguments."""
    model, tx = ConvNet(), optax.adam(1e-3)
    rows, whole = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((128, 16, 16, 3), jnp.float32, sharding=rows)
    y = jax.ShapeDtypeStruct((128,), jnp.int32, sharding=rows)
    values = jax.eval_shape(model.init, jax.random.key(0), x)
    values = drawn(jax.tree.map(lambda leaf: leaf.update(sharding=whole), values))

    def step(params: Any, state: Any, statistics: Any, x: Array, y: Array) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": statistics}
            logits, new = model.apply(variables, x, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y % 10)
            return losses.mean(), new["batch_stats"]

        (loss, new), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, new, loss

    params = values["params"]
    state = params, tx.init(params), values["batch_stats"]
    return jax.jit(step), state, (drawn(x), drawn(y))


STEPS = {
    "decoder in a scan, data 8": lambda: decoder(mesh_of(8, 1)),
    "decoder in a scan, HSDP on 2 x 4": lambda: decoder(mesh_of(2, 4)),
    "decoder of separate layers, HSDP on 2 x 4": lambda: decoder(mesh_of(2, 4), scan=False),
    "convolutions with batch norm, data 8": lambda: convolutions(mesh_of(8, 1)),
}


def paired(name: str, turns: int, repeats: int) -> dict[str, Any]:
    """Return the ratios of exact sums by `dq.compress` to the jitted step.

    Args:
      name: key of `STEPS`.
      turns: in which each step runs once.
      repeats: of the trace, of which the least counts.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    plain, state, batch = STEPS[name]()
    donating = jax.jit(plain.__wrapped__, donate_argnums=range(len(state)))  # type: ignore[attr-defined]
    arguments = (*state, *batch)
    ways: dict[str, Callable[[Any], Any]] = {
        "jax.jit": lambda step: step,
        "exact": lambda step: dq.compress(step, "data", method="exact"),
    }
    programs: dict[str, Any] = {}
    row: dict[str, Any] = {}
    for way, made in ways.items():
        step = made(plain)
        programs[way] = step.lower(*arguments).compile()
        row[way] = {
            "trace": traced_seconds(step, arguments, repeats),
            "memory": planned_bytes(programs[way]),
            "donated": planned_bytes(made(donating).lower(*arguments).compile()),
        }
    programs["again"] = programs["jax.jit"]
    calls = {way: functools.partial(each, *arguments) for way, each in programs.items()}
    for what, clock in (("step", time.perf_counter), ("cpu", time.process_time)):
        times = timing.in_turns(calls, turns, clock)
        for way in ways:
            row[way][what] = statistics.median(times[way])
        row[f"{what}_ratio"] = timing.median_ratio(times["exact"], times["jax.jit"])
        row[f"{what}_ratio_of_itself"] = timing.median_ratio(times["again"], times["jax.jit"])
    for what in ("memory", "donated", "trace"):
        row[f"{what}_ratio"] = row["exact"][what] / row["jax.jit"][what]
    return row


def planned_bytes(program: Any) -> int:
    """Return the memory of a device that a program takes: arguments, results, temporary arrays."""
    memory = program.memory_analysis()
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + whole)


def traced_seconds(step: Any, arguments: Any, repeats: int) -> float:
    """Return the least seconds of a core that the trace of a step takes."""
    seconds = []
    for _ in range(repeats):
        jax.clear_caches()
        trace = functools.partial(step.trace, *arguments)
        seconds.append(timing.timed(trace, time.process_time)[1])
    return min(seconds)


def compiled(way: str) -> dict[str, Any]:
    """Trace, lower and compile the decoder of many arrays in one of the ways."""
    jax.config.update("jax_num_cpu_devices", 4)
    mesh, model = mesh_of(4, 1), GlobalDecoder(**LARGE)  # type: ignore[arg-type]
    arguments = model.arguments(mesh, 16, 32)
    # Another program of the same way pays for what all of them need.
    first = GlobalDecoder(**(LARGE | {"layers": 1}))  # type: ignore[arg-type]
    _way(way, first, mesh).lower(*first.arguments(mesh, 16, 32))
    step = _way(way, model, mesh)
    traced, trace = timing.timed(lambda: step.trace(*arguments), time.process_time)
    lowered, lower = timing.timed(traced.lower, time.process_time)
    _, compile_seconds = timing.timed(lowered.compile, time.process_time)
    arrays = len(jax.tree.leaves(model.shapes()))
    return {
        "way": way,
        "arrays": arrays,
        "trace": trace,
        "lower": lower,
        "compile": compile_seconds,
    }


def _way(way: str, model: GlobalDecoder, mesh: Mesh) -> Any:
    if way == "dq.pmean":
        return jax.jit(_by_hand(model, mesh))
    step = jax.jit(model.step())
    if way == "jax.jit":
        return step
    return dq.compress(step, "data", method="exact" if way == "exact" else "dynamiq:5")


def _by_hand(model: GlobalDecoder, mesh: Mesh) -> Callable[..., Any]:
    """Return the step of a worker, with `dq.pmean` of its gradients."""

    def step(params: Any, state: Any, tokens: Array) -> Any:
        loss, gradients = jax.value_and_grad(model.loss)(params, tokens)
        key = jax.random.fold_in(jax.random.key(0), state[1][0].count)
        gradients = dq.pmean(gradients, "data", key=key)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "data")

    return jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )


PAIRED = (
    Column("step", "name"),
    Column("time", "step_ratio", "{:.3f}"),
    Column("of itself", "step_ratio_of_itself", "{:.3f}"),
    Column("CPU time", "cpu_ratio", "{:.3f}"),
    Column("of itself", "cpu_ratio_of_itself", "{:.3f}"),
    Column("memory, donated", "donated_ratio", "{:.3f}"),
    Column("kept", "memory_ratio", "{:.3f}"),
    Column("trace", "trace_ratio", "{:.2f}"),
)
COMPILED = (
    Column("step", "way"),
    Column("arrays", "arrays"),
    *(Column(name, name, "{:.2f} s") for name in ("trace", "lower", "compile")),
)


@benchmark("global_step")
def main(config: Config) -> Report:
    """Compare the steps, and compile the large one."""
    pairs = [
        {"name": name} | in_process(paired, name, config.turns, config.repeats) for name in STEPS
    ]
    ways = [in_process(compiled, way) for way in WAYS]
    return Report(
        results={"paired": pairs, "compiled": ways},
        shown=[
            table("dq.compress with exact sums, relative to jax.jit", PAIRED, pairs),
            table("A decoder of many arrays, in seconds of a core", COMPILED, ways),
        ],
        options=files.options_of(config, but=("save",)),
    )


if __name__ == "__main__":
    run(main, __doc__)
