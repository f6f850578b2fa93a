"""A data-parallel training step of a small model, scheduled for several GPUs with gradients in one
bucket or in one for each layer, and the bytes that travel while the backward pass computes.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import dynamiq_jax as dq
from benchmarks import h200
from benchmarks.plain_tables import print_table
from dynamiq_jax.topologies import resolve_topology

TOPOLOGIES = (
    "exact",
    "ring",
    "ring:unroll=True",
    "ring:bidirectional=True:unroll=True",
    "butterfly",
    "all_to_all",
)

# Each layer has four matrices: eight matmuls in its backward pass.
_LAYERS, _MATRICES, _WIDTH, _ROWS = 4, 4, 2048, 8192
_LAYER_BYTES = 4 * _MATRICES * _WIDTH**2
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# Of the bytes. Where buckets did not wait for each other it was 27 %.
_LEAST_SHARE, _LEAST_SHARE_OF_LOOP = 0.6, 0.35


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step: path of the gradients, buckets, and options of XLA."""

    topology: str  # or "exact"
    buckets: int
    options: tuple[tuple[str, Any], ...] = ()


def cases(topologies: Sequence[str]) -> list[Case]:
    """Return steps with a bucket for each layer and with one for all; exact sums go by matrix."""
    both = (("xla_gpu_experimental_parallel_collective_overlap_limit", 2),)
    result = []
    for name in topologies:
        if name == "exact":
            result.append(Case(name, _LAYERS * _MATRICES))
            continue
        if ":" not in name:
            result.append(Case(name, 1))
        result.append(Case(name, _LAYERS, both if "bidirectional" in name else ()))
    return result


def examine(case: Case, workers: int, dump: Path) -> dict[str, Any]:
    """Compile one training step: a row of the table."""
    split, whole = PartitionSpec("data"), PartitionSpec()
    count = _LAYERS * _MATRICES
    program = h200.compile_for(
        h200.mesh(workers, "data"),
        jax.shard_map(_step(case), in_specs=(whole, split, whole), out_specs=whole),
        [
            [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")] * count,
            jax.ShapeDtypeStruct((workers * _ROWS, _WIDTH), "bfloat16"),
            jax.ShapeDtypeStruct((2,), "uint32"),
        ],
        [whole, split, whole],
        dump=dump,
        options=dict(case.options),
    )
    transfers = list(_transfers(program))
    total = sum(transfer.bytes for transfer in transfers)
    under = [transfer for transfer in transfers if transfer.matmuls]
    share = sum(transfer.bytes for transfer in under) / total
    matmuls = sum(i.matmul and i.backward for i in program.computations[program.entry])
    problems = {
        f"has {matmuls} matmuls in its backward pass, not {2 * count - 1} or {2 * count}": (
            not 2 * count - 1 <= matmuls <= 2 * count
        ),
        f"sends only {share:.0%} of the bytes under a matmul": (
            case.buckets > 1
            and share < (_LEAST_SHARE_OF_LOOP if case.topology == "ring" else _LEAST_SHARE)
        ),
        f"sends {share:.0%} of the bytes under a matmul, with one bucket?": (
            case.buckets == 1 and share > 0
        ),
    }
    return {
        "topology": case.topology,
        "buckets": case.buckets,
        "options": dict(case.options),
        "backward_matmuls": matmuls,
        "transfers": sum(transfer.times for transfer in transfers),
        "transfers_in_loops": sum(transfer.times for transfer in transfers if transfer.in_loop),
        "transfers_under_matmul": sum(transfer.times for transfer in under),
        "share_of_bytes_under_matmul": share,
        "problems": [text for text, wrong in problems.items() if wrong],
    }


def print_steps(rows: list[dict[str, Any]], workers: int) -> None:
    """Print a table of what travels under the backward pass, if anything was compiled."""
    if rows:
        print_table(
            f"Training step on {workers} H200: transfers under a matmul of the backward pass",
            "buckets,transfers,in loops,under a matmul,of the bytes,options of XLA",
            [
                [
                    row["topology"],
                    str(row["buckets"]),
                    str(row["transfers"]),
                    str(row["transfers_in_loops"]),
                    str(row["transfers_under_matmul"]),
                    f"{row['share_of_bytes_under_matmul']:.0%}",
                    _options(row),
                ]
                for row in rows
            ],
        )


def _step(case: Case) -> Any:
    method = dq.DynamiQ(implementation="triton")

    def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return x @ matrix.astype(x.dtype)

    def loss(matrices: list[jax.Array], x: jax.Array) -> jax.Array:
        for into, out in zip(matrices[::2], matrices[1::2], strict=True):
            x = x + multiply(jax.nn.relu(multiply(x, into)), out)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: list[jax.Array], x: jax.Array, key_data: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(loss)(lax.pcast(params, "data", to="varying"), x)
        if case.topology == "exact":
            mean = lax.pmean(gradients, "data")
        else:
            mean = dq.pmean(
                gradients,
                "data",
                key=jax.random.wrap_key_data(key_data),
                method=method,
                topology=resolve_topology(case.topology),
                options=dq.Options(bucket_bytes=_LAYERS * _LAYER_BYTES // case.buckets),
            )
        return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, mean)

    return step


@dataclasses.dataclass(frozen=True)
class _Transfer:
    bytes: int  # of the results, all times
    times: int
    in_loop: bool
    matmuls: int  # of the backward pass, between start and end


def _transfers(program: h200.Program) -> Iterator[_Transfer]:
    turns = {i.body: i.turns for rows in program.computations.values() for i in rows if i.body}
    for name, rows in program.computations.items():
        times = turns.get(name, 1)
        for first, start in enumerate(rows):
            kind = start.opcode.removesuffix("-start")
            if kind not in _COLLECTIVES:
                continue
            end = first
            if start.opcode != kind:  # else nothing runs meanwhile
                end = next(
                    index
                    for index, row in enumerate(rows)
                    if row.opcode == f"{kind}-done" and start.name in row.operands
                )
            yield _Transfer(
                bytes=times * h200.size_of(rows[end].shape),
                times=times,
                in_loop=name in turns,
                matmuls=sum(row.matmul and row.backward for row in rows[first + 1 : end]),
            )


def _options(row: dict[str, Any]) -> str:
    named = row["options"].items()
    return ", ".join(f"{key.rpartition('_collective_')[2]}={value}" for key, value in named) or "-"
