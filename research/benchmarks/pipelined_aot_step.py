"""A pipelined training step of a small model, scheduled for several GPUs: the bytes that are
gathered while the forward pass computes, and those that are scattered under the backward pass.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

import dynamiq_jax as dq
from benchmarks.aot.transfers import COLLECTIVES, Transfer, transfers_of
from benchmarks.error.plain_tables import print_table
from benchmarks.gpu import h200_model as h200
from dynamiq_jax.topologies import resolve_topology
from dynamiq_research import Pipelined, PipelinedUpdate

# Each layer has four matrices: four matmuls in a forward pass.
_MATRICES, _WIDTH, _ROWS = 4, 2048, 8192
_LAYER_BYTES = 4 * _MATRICES * _WIDTH**2
_GATHERED, _SCATTERED = "pipelined.gather", "pipelined.scatter"
_LEAST_SHARE = 0.7  # of the bytes
_OVERLAPPING = ("all_to_all", "ring:unroll=True")  # topologies without a loop


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step."""

    topology: str  # of the first half
    pipelined: bool = True  # else both halves are at the end of the step
    layers: int = 8
    buckets_per_layer: int = 1


CASES = (
    Case("all_to_all"),
    Case("all_to_all", pipelined=False),
    Case("ring:unroll=True"),
    Case("ring"),
    Case("all_to_all", buckets_per_layer=2),
)


def examine(case: Case, workers: int, dump: Path) -> dict[str, Any]:
    """Compile one step: a row of the table."""
    where = h200.mesh(workers, "data")
    step, state, specs = _step(case, where)
    rows = jax.ShapeDtypeStruct((workers * _ROWS, _WIDTH), "bfloat16")
    split = PartitionSpec("data")
    program = h200.compile_for(where, step, [state, rows], [specs, split], dump=dump)
    gathered, scattered = (
        [one for one in transfers_of(program, pass_) if scope in one.scope]
        for scope, pass_ in ((_GATHERED, _is_forward), (_SCATTERED, _is_backward))
    )
    shares = _share(gathered), _share(scattered)
    # XLA supposes that every transfer takes as long as five matmuls: with smaller buckets, there
    # are not enough of these for all.
    expected = case.pipelined and case.topology in _OVERLAPPING and case.buckets_per_layer == 1
    least = _LEAST_SHARE if expected else 0
    problems = {
        f"gathers only {shares[0]:.0%} of the bytes under the forward pass": shares[0] < least,
        f"scatters only {shares[1]:.0%} of the bytes under the backward pass": shares[1] < least,
        "gathers under a forward pass that is over": not case.pipelined and shares[0] > 0,
    }
    return {
        **dataclasses.asdict(case),
        "gathered_bytes": sum(transfer.bytes for transfer in gathered),
        "scattered_bytes": sum(transfer.bytes for transfer in scattered),
        "gathered_under_forward": shares[0],
        "scattered_under_backward": shares[1],
        "schedule": schedule_of(program),
        "problems": [text for text, wrong in problems.items() if wrong],
    }


def schedule_of(program: h200.Program) -> list[list[Any]]:
    """List everything that takes time in the order in which it starts.

    Returns:
      For each matmul ["forward"] or ["backward"], for each kernel ["codec"], and for each transfer
      [kind, number, bytes] at its start and ["done", number] at its end; kind is "gather",
      "scatter" or "other".
    """
    events: list[list[Any]] = []
    transfers: dict[str, list[Any]] = {}  # by the name of their start
    for one in program.computations[program.entry]:
        kind = one.opcode.removesuffix("-start")
        if one.matmul:
            events.append(["backward" if one.backward else "forward"])
        elif one.pallas:
            events.append(["codec"])
        elif kind in COLLECTIVES:
            halves = [half for half in ("gather", "scatter") if f"pipelined.{half}" in one.scope]
            begun = [next(iter(halves), "other"), len(transfers), h200.size_of(one.shape)]
            transfers[one.name] = begun
            events.append(begun)
            if one.opcode == kind:  # nothing runs meanwhile
                events.append(["done", begun[1]])
        elif one.opcode.endswith("-done") and one.operands[0] in transfers:
            begun = transfers[one.operands[0]]
            begun[2] = h200.size_of(one.shape)  # of the results alone
            events.append(["done", begun[1]])
    return events


def print_steps(rows: list[dict[str, Any]], workers: int) -> None:
    """Print a table of what travels under which pass."""
    print_table(
        f"Pipelined step on {workers} H200: bytes that travel under a matmul",
        "pipelined,buckets a layer,gathered under forward,scattered under backward",
        [
            [
                row["topology"],
                "yes" if row["pipelined"] else "no",
                str(row["buckets_per_layer"]),
                f"{row['gathered_under_forward']:.0%}",
                f"{row['scattered_under_backward']:.0%}",
            ]
            for row in rows
        ],
    )


def _is_forward(instruction: h200.Instruction) -> bool:
    return instruction.matmul and not instruction.backward


def _is_backward(instruction: h200.Instruction) -> bool:
    return instruction.matmul and instruction.backward


def _share(transfers: Sequence[Transfer]) -> float:
    """Return the share of bytes that travel while something runs."""
    total = sum(transfer.bytes for transfer in transfers)
    return sum(transfer.bytes for transfer in transfers if transfer.covered) / total


def _step(case: Case, mesh: Any) -> tuple[Any, Any, Any]:
    pipelined = Pipelined(
        optimizer=optax.adamw(1e-3),
        axis_name="data",
        method=dq.Compression(
            dq.DynamiQ(implementation="triton", rounding="correlated"),
            resolve_topology(case.topology),
            bucket_bytes=_LAYER_BYTES // case.buckets_per_layer,
        ),
        clip_norm=1.0,
    )
    specs = pipelined.state_specs
    matrix = jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")
    params = [[matrix] * _MATRICES] * case.layers

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for matrices in params:
            for into, out in zip(matrices[::2], matrices[1::2], strict=True):
                hidden = jax.nn.relu(x @ into.astype(x.dtype))
                x = x + hidden @ out.astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def local(state: Any, x: jax.Array) -> Any:
        updated = pipelined.gather(state) if case.pipelined else PipelinedUpdate(*state)
        own = lax.pcast(updated.params, "data", to="varying")
        state = pipelined.scatter(jax.grad(loss)(own, x), updated)
        return state if case.pipelined else pipelined.gather(state)

    whole = PartitionSpec()
    init = jax.shard_map(pipelined.init, mesh=mesh, in_specs=whole, out_specs=specs)
    state = jax.eval_shape(init, params)
    if not case.pipelined:
        gather = jax.shard_map(pipelined.gather, mesh=mesh, in_specs=(specs,), out_specs=whole)
        state, specs = jax.eval_shape(gather, state), whole
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, PartitionSpec("data")), out_specs=specs)
    return step, state, specs
