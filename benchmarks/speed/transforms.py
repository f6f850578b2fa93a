"""Bytes, memory, compile time and step time of `dq.data_parallel` by its transformation.

    python -m benchmarks.speed.transforms

Each program of the decoder with the shapes of Llama 3 8B is compiled for 16 virtual devices in a
process of its own, and never run. Those of a small decoder run on 8, one step of each in turn.
"""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common
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
    one: str = ""  # a program to compile in this process, for internal use


def mesh_of(*shape: int) -> Mesh:
    """Return a mesh of data x fsdp, whose devices are numbered in order."""
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def describe(lowered: Any, mesh: Mesh) -> tuple[Any, dict[str, Any]]:
    """Compile a program; return it with its seconds of a core, its memory and its bytes."""
    start = time.process_time()
    program = lowered.compile()
    seconds = time.process_time() - start
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
    start = time.process_time()
    lowered = decoder.Case(form, layers, (2, 8)).lower()
    seconds = time.process_time() - start
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
        start = time.process_time()
        lowered = step.lower(params, batch)
        seconds = time.process_time() - start
        programs[form], row = describe(lowered, mesh)
        rows.append({"model": "small", "form": form, "lower_seconds": seconds} | row)
    times: dict[str, list[float]] = {form: [] for form in programs}
    for _ in range(steps + 1):
        for form, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params, batch))
            times[form].append(time.perf_counter() - start)
    for row in rows:
        own, base = times[row["form"]][1:], times["shard_map"][1:]
        row["step_seconds"] = statistics.median(own)
        row["step_ratio"] = statistics.median(a / b for a, b in zip(own, base, strict=True))
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


def main(config: Config) -> None:
    """Compile all programs, print a table and write the result."""
    if config.one:
        print(json.dumps(large(config.one, config.layers)))
        return
    console = Console()
    rows = small(config.steps)
    for form in LARGE:
        command = [sys.executable, "-m", "benchmarks.speed.transforms"]
        command += ["--one", form, "--layers", str(config.layers)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    console.print(_table(rows))
    if config.save:
        options = {"layers": config.layers, "steps": config.steps}
        console.print(f"Wrote {common.save('transforms', options, rows)}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Transformations of a data-parallel loss")
    for heading in ("model", "form", "lower", "compile", "temporary", "workers", "other", "step"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["model"],
            row["form"],
            *(f"{row[name]:.1f} s" for name in ("lower_seconds", "compile_seconds")),
            *(
                f"{row[name] / 1e6:.2f} MB"
                for name in ("temporary_bytes", "worker_bytes", "other_bytes")
            ),
            f"{row['step_ratio']:.2f}" if "step_ratio" in row else "",
        )
    return table


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
