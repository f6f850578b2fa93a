"""A global train step, compiled for two hosts of four H200 and for two slices of four TPU v5p:
bytes between these, and the share that travels under the backward pass.

    python -m benchmarks.aot.global_step

The mesh of a decoder is data 2 x fsdp 4, and "data" is the slow axis. Its step is compiled as it
is, and by `dq.compress`. Layers are separate, and a bucket has the shards of one layer, in order.
Each program is compiled in a process of its own.

Between slices of TPUs, the compiler sends by its runtime for several slices: `send` and `recv`.

It needs both compilers: pip install -e '.[cli,cuda13-aot,tpu-aot]'.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import dynamiq_jax as dq
from benchmarks.aot import tpu_programs as tpu
from benchmarks.aot.transfers import COLLECTIVES
from benchmarks.gpu import h200_model as h200
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.processes import in_process
from benchmarks.training.global_decoder import GlobalDecoder
from dynamiq_jax._inspection.collectives import collectives_of, groups_of
from dynamiq_jax._inspection.devices import Devices
from dynamiq_jax._inspection.hlo import (
    HloComputation,
    HloInstruction,
    HloProgram,
    arrays_of,
    parts_of,
)
from pallas_kernels.modes import without_gpu

AXES = {"data": 2, "fsdp": 4}
FORMS = ("jax.jit", "dq.compress")
TARGETS = {"H200": "two hosts of 4 H200", "v5p": "two slices of 4 TPU v5p"}
MODEL = GlobalDecoder(4, 1024, 16384, heads=8, scan=False, dtype=jnp.bfloat16)
ROWS, LENGTH = 16, 1024
OPTIONS = dq.Compression(bucket_bytes=2**24, bucketing="in_order")  # float32 shards of a layer
TOPOLOGY = "ring:unroll=True"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    targets: tuple[str, ...] = tuple(TARGETS)
    forms: tuple[str, ...] = FORMS
    save: bool = True  # write the result to benchmarks/results/aot_global_step.json


@benchmark("aot_global_step")
def main(config: Config) -> Report:
    """Compile all programs."""
    rows = [
        in_process(compiled_row, target, form) for target in config.targets for form in config.forms
    ]
    return Report(
        results=rows,
        shown=[table("A decoder on data 2 x fsdp 4", COLUMNS, rows)],
        options=files.options_of(config, but=("save",)),
    )


def compiled_row(target: str, form: str) -> dict[str, Any]:
    """Compile a step for a target: a row of the table."""
    mesh, text = compile_for_h200(form) if target == "H200" else compile_for_tpu(form)
    return {"target": target, "form": form} | traffic(text, mesh)


def compile_for_h200(form: str) -> tuple[Mesh, str]:
    """Compile a step for two hosts of four H200; return the mesh and the text of the program."""
    with tempfile.TemporaryDirectory() as folder, without_gpu("compile"):
        h200.prepare(Path(folder))
        mesh = h200.mesh_of_hosts(AXES)
        step, arguments = _step(form, mesh, dq.DynamiQ(implementation="triton"))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
        return mesh, lowered.compile().as_text()


def compile_for_tpu(form: str) -> tuple[Mesh, str]:
    """Compile a step for two slices of four TPUs; return the mesh and the text of the program."""
    tpu.prepare()
    mesh = tpu.mesh("v5p:2x2x1", 2, AXES)
    step, arguments = _step(form, mesh, "dynamiq:5")
    with tpu.as_on_tpu():
        lowered = step.lower(*arguments)
    return mesh, lowered.compile().as_text()


def _step(form: str, mesh: Mesh, method: Any) -> tuple[Any, Any]:
    compression = dataclasses.replace(OPTIONS, method=method, topology=TOPOLOGY)
    step = jax.jit(MODEL.step(), donate_argnums=(0, 1))
    if form == "dq.compress":
        step = dq.compress(step, "data", compression)
    return step, MODEL.arguments(mesh, ROWS, LENGTH)


# ------------------------------------------------------------------------------------ the program


def traffic(text: str, mesh: Mesh) -> dict[str, Any]:
    """Count the bytes of a scheduled program.

    Returns:
      Bytes that each device sends over the slow axis and over the fast one alone, and the share of
      the bytes over the slow axis that is under way while a matmul of the backward pass runs.
    """
    devices = Devices.of(mesh)
    slow = list(_slow_transfers(HloProgram(text), devices, mesh.size))
    sent = collectives_of(text, devices)
    between = [max(each.bytes_of_hosts) for each in sent if each.bytes_of_hosts]
    return {
        "slow_bytes": sum(between) / AXES["fsdp"]
        + sum(transfer.bytes for transfer in slow if transfer.is_of_runtime),
        "fast_bytes": sum(each.bytes for each in sent if each.axes == ("fsdp",)),
        "transfers": len(slow),
        "share_under_backward": sum(transfer.bytes for transfer in slow if transfer.is_covered)
        / sum(transfer.bytes for transfer in slow),
    }


@dataclasses.dataclass(frozen=True)
class SlowTransfer:
    """Collective over the slow axis."""

    bytes: float  # of the result
    is_covered: bool  # by a matmul of the backward pass
    is_of_runtime: bool  # by which TPUs send between slices


def _slow_transfers(program: HloProgram, devices: Devices, count: int) -> Iterator[SlowTransfer]:
    for computation in program.computations.values():
        lines = list(computation.values())
        products = [number for number, line in enumerate(lines) if _is_backward(program, line)]
        for first, start in enumerate(lines):
            kind = start.opcode.removesuffix("-start")
            of_runtime = start.opcode == "send" and "is_host_transfer=true" in start.attributes
            if of_runtime:
                received = _received(computation, start)
                last = lines.index(_user(computation, received, "recv-done"))
                size = sum(array.bytes for array in arrays_of(parts_of(start.type)[0]))
            elif kind in COLLECTIVES and "data" in (devices.axes_of(groups_of(start, count)) or ()):
                end = start
                if start.opcode != kind:
                    end = _user(computation, start, f"{kind}-done")
                last, size = lines.index(end), sum(array.bytes for array in end.arrays)
            else:
                continue
            covered = any(first < number < last for number in products)
            yield SlowTransfer(size, covered, of_runtime)


def _received(computation: HloComputation, sent: HloInstruction) -> HloInstruction:
    """Return what a device receives while it sends."""
    key = r'_xla_host_transfer_rendezvous="([^"]*)"'
    return next(
        line
        for line in computation.values()
        if line.opcode == "recv" and line.attribute(key) == sent.attribute(key)
    )


def _user(computation: HloComputation, used: HloInstruction, opcode: str) -> HloInstruction:
    return next(
        line
        for line in computation.values()
        if line.opcode == opcode and used.name in line.operands
    )


def _is_backward(program: HloProgram, line: HloInstruction) -> bool:
    """Return whether an instruction is a matmul of the backward pass."""
    if "transpose(jvp(" not in line.source:
        return False
    inside = program.computations.get(line.called("calls"), {}) if line.opcode == "fusion" else {}
    of_library = line.opcode == "custom-call" and "gemm" in line.attributes
    return of_library or any(
        each.opcode in ("convolution", "dot") for each in (line, *inside.values())
    )


COLUMNS = (
    Column("target", lambda row: TARGETS[row["target"]]),
    Column("step", "form"),
    Column("slow axis", lambda row: row["slow_bytes"] / 1e6, "{:.1f} MB"),
    Column("fast axis", lambda row: row["fast_bytes"] / 1e6, "{:.1f} MB"),
    Column("transfers", "transfers"),
    Column("under backward", "share_under_backward", "{:.0%}"),
)


if __name__ == "__main__":
    run(main, __doc__)
