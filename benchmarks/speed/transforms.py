"""Bytes, memory, compile time and step time of `dq.data_parallel` by its transformation.

    python -m benchmarks.speed.transforms

Each program of the decoder with the shapes of Llama 3 8B is compiled for 16 virtual devices in a
process of its own, and never run. Those of a small decoder run on 8, one step of each in turn.
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
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from benchmarks.harness.timing import in_turns, median_ratio, timed
from benchmarks.speed.mesh_bytes import sent_by_axes
from benchmarks.training.big_models import decoder

P = PartitionSpec
LARGE = ("exact", "pcast in the scan", *decoder.TRANSFORMS)
LAYERS, WIDTH, VOCABULARY, ROWS, TOKENS = 4, 256, 2048, 32, 64
SPECS = {
    "embed": P("fsdp"),
    "head": P(None, "fsdp"),
    "layers": {"up": P(None, "fsdp"), "down": P(None, None, "fsdp")},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    layers: int = 32  # of the large decoder
    steps: int = 30  # of each program of the small one
    save: bool = True  # write the result to benchmarks/results/transforms.json


def mesh_of(*shape: int) -> Mesh:
    """Return a mesh of data x fsdp, whose devices are numbered in order."""
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def describe(lowered: Any, mesh: Mesh) -> tuple[Any, dict[str, Any]]:
    """Compile a program; return it with its seconds of a core, its memory and its bytes."""
    program, seconds = timed(lowered.compile, time.process_time)
    sent = sent_by_axes(program.as_text(), mesh)
    own = sent.get(("data",), 0.0)
    return program, {
        "compile_seconds": seconds,
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "worker_bytes": own,
        "other_bytes": sum(sent.values()) - own,
    }


def large(form: str, layers: int) -> dict[str, Any]:
    """Lower and compile a training step of the large decoder."""
    jax.config.update("jax_num_cpu_devices", 16)
    lowered, seconds = timed(decoder.Case(form, layers, (2, 8)).lower, time.process_time)
    _, row = describe(lowered, mesh_of(2, 8))
    return {"model": "8 B", "form": form, "lower_seconds": seconds} | row


# ------------------------------------------------------------------------------ the small decoder


def parameters() -> Any:
    """Return float32 parameters."""
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "head": (WIDTH, VOCABULARY),
        "layers": {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)},
    }
    return jax.tree.map(
        lambda shape: (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def loss_fn(params: Any, tokens: Array, by_rows: Callable[[Array], Array]) -> Array:
    """Return the mean cross entropy of the next tokens, int32 [rows, tokens + 1]."""

    def layer(x: Array, weights: Any) -> tuple[Array, None]:
        hidden = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
        shares = jax.nn.softmax(jnp.einsum("btd,bsd->bts", hidden, hidden) / WIDTH**0.5)
        x = x + shares @ hidden
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None

    x, _ = lax.scan(jax.checkpoint(layer), params["embed"][tokens[:, :-1]], params["layers"])
    scores = by_rows(jax.nn.log_softmax(x @ params["head"]))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def small(steps: int) -> list[dict[str, Any]]:
    """Compile the small decoder in all ways, and time steps of them in turn."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = mesh_of(2, 4)
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.device_put(parameters(), placed)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, TOKENS + 1), np.int32)
    batch = jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp"))))
    programs, rows = {}, []
    for form in ("exact", *decoder.TRANSFORMS):
        whole = NamedSharding(mesh, P())
        step = jax.jit(jax.value_and_grad(_loss(form, mesh)), out_shardings=(whole, placed))
        lower = functools.partial(step.lower, params, batch)
        lowered, seconds = timed(lower, time.process_time)
        programs[form], row = describe(lowered, mesh)
        rows.append({"model": "small", "form": form, "lower_seconds": seconds} | row)
    calls = {form: functools.partial(each, params, batch) for form, each in programs.items()}
    times = in_turns(calls, steps)
    for row in rows:
        row["step_seconds"] = statistics.median(times[row["form"]])
        row["step_ratio"] = median_ratio(times[row["form"]], times["shard_map"])
    return rows


def _loss(form: str, mesh: Mesh) -> Callable[..., Array]:
    def split(scores: Array) -> Array:
        return lax.with_sharding_constraint(scores, NamedSharding(mesh, P("fsdp", None, None)))

    by_rows = split if form.endswith("with rows") else lambda scores: scores
    loss = functools.partial(loss_fn, by_rows=by_rows)
    if form == "exact":
        return loss
    transform: Any = form.split()[0]
    return dq.data_parallel(
        lambda params, tokens: loss(params, tokens),
        mesh=mesh,
        axis_name="data",
        specs=SPECS,
        transform=transform,
    )


# ------------------------------------------------------------------------------------ the command


COLUMNS = (
    Column("model", "model"),
    Column("form", "form"),
    Column("lower", "lower_seconds", "{:.1f} s"),
    Column("compile", "compile_seconds", "{:.1f} s"),
    *(
        Column(heading, lambda row, key=key: row[key] / 1e6, "{:.2f} MB")
        for heading, key in (
            ("temporary", "temporary_bytes"),
            ("workers", "worker_bytes"),
            ("other", "other_bytes"),
        )
    ),
    Column("step", lambda row: row.get("step_ratio"), "{:.2f}"),
)


@benchmark("transforms")
def main(config: Config) -> Report:
    """Compile all programs."""
    rows = small(config.steps)
    rows += [in_process(large, form, config.layers) for form in LARGE]
    return Report(
        results=rows,
        shown=[table("Transformations of a data-parallel loss", COLUMNS, rows)],
        options=files.options_of(config, but=("save",)),
    )


if __name__ == "__main__":
    run(main, __doc__)
