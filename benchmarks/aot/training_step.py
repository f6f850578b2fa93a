"""A data-parallel training step of a small model, scheduled for several GPUs, and the bytes that
travel while the backward pass computes.

Gradients are reduced in one bucket, or in one for each layer, after the backward pass as it is
written.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import dynamiq_jax as dq
from benchmarks.aot.transfers import transfers_of
from benchmarks.error.plain_tables import print_table
from benchmarks.gpu import h200_model as h200

TOPOLOGIES = ("exact", "ring", "ring:unroll=True", "butterfly", "all_to_all")

# Each layer has four matrices: eight matmuls in its backward pass.
_LAYERS, _MATRICES, _WIDTH, _ROWS = 4, 4, 2048, 8192
_MATRIX_BYTES = 4 * _WIDTH**2
# Of the bytes. Where buckets did not wait for each other it was 27 %.
_LEAST_SHARE, _LEAST_SHARE_OF_LOOP = 0.6, 0.35


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step: path of the gradients, and buckets."""

    topology: str  # or "exact"
    matrices: int  # in a bucket; all of them, or a part of a layer


def cases(topologies: Sequence[str]) -> list[Case]:
    """Return steps with a bucket for each layer and with one for all; exact sums go by matrix."""
    result = []
    for name in topologies:
        if name == "exact":
            result.append(Case(name, 1))
            continue
        if ":" not in name:
            result.append(Case(name, _LAYERS * _MATRICES))
        result.append(Case(name, _MATRICES))
    return result


def examine(case: Case, workers: int, dump: Path) -> dict[str, Any]:
    """Compile one training step: a row of the table."""
    split, whole = PartitionSpec("data"), PartitionSpec()
    program = h200.compile_for(
        h200.mesh(workers, "data"),
        jax.shard_map(_step(case), in_specs=(whole, split, whole), out_specs=whole),
        [
            _parameters(),
            jax.ShapeDtypeStruct((workers * _ROWS, _WIDTH), "bfloat16"),
            jax.ShapeDtypeStruct((2,), "uint32"),
        ],
        [whole, split, whole],
        dump=dump,
    )
    transfers = list(
        transfers_of(program, lambda instruction: instruction.matmul and instruction.backward)
    )
    total = sum(transfer.bytes for transfer in transfers)
    under = [transfer for transfer in transfers if transfer.covered]
    share = sum(transfer.bytes for transfer in under) / total
    return {
        "topology": case.topology,
        "layers": _LAYERS,
        "matrices_per_bucket": case.matrices,
        "transfers": sum(transfer.times for transfer in transfers),
        "transfers_in_loops": sum(transfer.times for transfer in transfers if transfer.in_loop),
        "transfers_under_matmul": sum(transfer.times for transfer in under),
        "share_of_bytes_under_matmul": share,
        "problems": _problems(case, program, share),
    }


def _problems(case: Case, program: h200.Program, share: float) -> list[str]:
    least = _LEAST_SHARE_OF_LOOP if case.topology == "ring" else _LEAST_SHARE
    one_bucket = case.matrices == _LAYERS * _MATRICES
    problems = {
        f"sends only {share:.0%} of the bytes under a matmul": not one_bucket and share < least,
        f"sends {share:.0%} of the bytes under a matmul, with one bucket?": (
            one_bucket and share > 0
        ),
    }
    count = 2 * _LAYERS * _MATRICES
    matmuls = sum(i.matmul and i.backward for i in program.computations[program.entry])
    text = f"has {matmuls} matmuls in its backward pass, not {count - 1} or {count}"
    problems[text] = not count - 1 <= matmuls <= count
    return [text for text, wrong in problems.items() if wrong]


def print_steps(rows: list[dict[str, Any]], workers: int) -> None:
    """Print a table of what travels under the backward pass, if anything was compiled."""
    if rows:
        print_table(
            f"Training step on {workers} H200: transfers under a matmul of the backward pass",
            "matrices a bucket,transfers,in loops,under a matmul,of the bytes",
            [
                [
                    row["topology"],
                    str(row["matrices_per_bucket"]),
                    str(row["transfers"]),
                    str(row["transfers_in_loops"]),
                    str(row["transfers_under_matmul"]),
                    f"{row['share_of_bytes_under_matmul']:.0%}",
                ]
                for row in rows
            ],
        )


def _parameters() -> list[Any]:
    """Return the layers, each a list of matrices."""
    return [[jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")] * _MATRICES] * _LAYERS


def _layer(x: jax.Array, matrices: Sequence[jax.Array]) -> jax.Array:
    for into, out in zip(matrices[::2], matrices[1::2], strict=True):
        hidden = jax.nn.relu(x @ into.astype(x.dtype))
        x = x + hidden @ out.astype(x.dtype)
    return x


def _step(case: Case) -> Any:
    arguments: dict[str, Any] = {}
    if case.topology != "exact":
        compression = dq.Compression(
            dq.DynamiQ(implementation="triton"),
            case.topology,
            bucket_bytes=case.matrices * _MATRIX_BYTES,
            bucketing="in_order",
        )
        arguments = {"method": compression}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for matrices in params:
            x = _layer(x, matrices)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params: Any, x: jax.Array, key_data: jax.Array) -> Any:
        own = jax.grad(loss)(lax.pcast(params, "data", to="varying"), x)
        key = jax.random.wrap_key_data(key_data)
        mean = dq.pmean(own, "data", key=key, **arguments) if arguments else lax.pmean(own, "data")
        return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, mean)

    return step
