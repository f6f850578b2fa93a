"""A compressed `pmean` alone, for several GPUs, and the kernels that run while bytes travel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

import dynamiq_jax as dq
from benchmarks.error.plain_tables import print_table
from benchmarks.gpu import h200_model as h200
from dynamiq_jax.topologies import Ring, resolve_topology


def examine(name: str, workers: int, leaf_sizes: Sequence[int], dump: Path) -> dict[str, Any]:
    """Compile `pmean` by one topology for several GPUs: a row of the table."""
    topology, method = resolve_topology(name), dq.DynamiQ(implementation="triton")

    def mean(tree, key_data):
        tree, key = [leaf[0] for leaf in tree], jax.random.wrap_key_data(key_data)
        return dq.pmean(tree, "data", key=key, method=dq.Compression(method, topology))

    split, whole = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(mean, in_specs=(split, whole), out_specs=whole)
    leaves = [jax.ShapeDtypeStruct((workers, size), "float32") for size in leaf_sizes]
    program = h200.compile_for(
        h200.mesh(workers, "data"),
        lambda *args: mapped(args[:-1], args[-1]),
        [*leaves, jax.ShapeDtypeStruct((2,), "uint32")],
        [split] * len(leaves) + [whole],
        dump=dump,
    )
    entry = program.computations[program.entry]
    around = [instruction for instruction in entry if instruction.runs]
    transfers, hop_kernels, meanwhile = 0, 0, []
    for computation, instructions in program.computations.items():
        starts = [i for i in instructions if i.opcode == "collective-permute-start"]
        transfers += len(starts)
        if starts and computation != program.entry:
            hop_kernels += sum(instruction.pallas for instruction in instructions)
        meanwhile += [_while_under_way(start, instructions) for start in starts]
    looped = program.entry not in {
        computation
        for computation, instructions in program.computations.items()
        if any(i.opcode == "collective-permute-start" for i in instructions)
    }
    row: dict[str, Any] = {
        "topology": name,
        "transfers": transfers,
        "hop_kernels": hop_kernels,
        "meanwhile": meanwhile,
        "triton_around": sum(instruction.pallas for instruction in around),
        "xla_around": sum(i.opcode in ("fusion", "copy", "sort", "custom-call") for i in around)
        - sum(instruction.pallas for instruction in around),
    }
    problems = {
        "has no transfers from neighbour to neighbour": (
            isinstance(topology, Ring) and not transfers
        ),
        f"takes {hop_kernels} kernels for {transfers} hops": looped and hop_kernels != transfers,
    }
    return row | {"problems": [text for text, wrong in problems.items() if wrong]}


def print_means(rows: list[dict[str, Any]], workers: int) -> None:
    """Print a table of what runs while bytes travel, if anything was compiled."""
    if rows:
        print_table(
            f"pmean on {workers} H200, in the loop over hops and outside it",
            "transfers,hop kernels,during each transfer,Triton outside,XLA outside",
            [
                [
                    row["topology"],
                    str(row["transfers"]),
                    str(row["hop_kernels"]),
                    "; ".join(", ".join(ops) or "nothing" for ops in row["meanwhile"]),
                    str(row["triton_around"]),
                    str(row["xla_around"]),
                ]
                for row in rows
            ],
        )


def _while_under_way(start: h200.Instruction, instructions: list[h200.Instruction]) -> list[str]:
    """Return the operations between the start of a transfer and its end."""
    first = instructions.index(start)
    last = next(
        index
        for index, instruction in enumerate(instructions)
        if instruction.opcode == "collective-permute-done" and start.name in instruction.operands
    )
    return [
        "triton kernel" if instruction.pallas else instruction.opcode
        for instruction in instructions[first + 1 : last]
        if instruction.runs
    ]
