"""Compilation for one or several H200 on a machine without a GPU, and the parts of the resulting
programs.
"""

import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

INSTALL = "pip install -e '.[cuda13-aot]'"
_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")  # of the version of jax
_COMPILER = ("nvidia-cuda-nvcc", "nvidia-nvvm")

# The data sheet of an H200 SXM, and the limits of compute capability 9.0.
MULTIPROCESSORS, SCHEDULERS, LANES = 132, 4, 32
CLOCK_GHZ, MEMORY_GBYTES_PER_SECOND = 1.98, 4800
REGISTERS, SHARED_BYTES, WARPS = 65_536, 233_472, 64  # of a multiprocessor
_DEVICE = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": LANES,
    "threads_per_core_limit": WARPS * LANES,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": SHARED_BYTES - 1024,
    "shared_memory_per_core": SHARED_BYTES,
    "registers_per_block_limit": REGISTERS,
    "registers_per_core_limit": REGISTERS,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "core_count": MULTIPROCESSORS,
    "fpus_per_core": SCHEDULERS * LANES,
    "clock_rate_ghz": CLOCK_GHZ,
    "memory_bandwidth": MEMORY_GBYTES_PER_SECOND * 10**9,
    "device_memory_size": 150 * 10**9,
    "l2_cache_size": 60 * 2**20,
    "cuda_compute_capability": {"major": 9, "minor": 0},
}
_TARGET = {
    "gpu_device_info": _DEVICE,
    "platform_name": '"CUDA"',
    "device_description_str": '"NVIDIA H200"',
    "dnn_version_info": {"major": 9, "minor": 10},
    "runtime_version": {"major": 13},
}

# Which pipe of a scheduler runs an instruction, by the start of its name. "LD." is of any memory.
_PIPES = {
    "FMA": "FFMA FADD FMUL IMAD IMUL HFMA2 HADD2 HMUL2",
    "ALU": "LOP3 SHF IADD3 VIADD ISETP FSETP IMNMX VIMNMX FMNMX HMNMX2 SEL FSEL PRMT LEA IABS MOV "
    "PLOP3 BMSK SGXT I2FP F2FP P2R R2P CSEL HSET",
    "XU": "MUFU F2I I2F FRND F2F POPC FLO BREV",
    "LSU": "LD. ST. LDG STG LDS STS LDSM STSM SHFL ATOM RED LDL STL",
}

# Issue slots that an instruction keeps its pipe busy for: 32 lanes over those of the pipe.
_SLOTS = {"FMA": 1, "ALU": 2, "XU": 8, "LSU": 4}

_MOSAIC = "mosaic_gpu.txt"  # what it prints: kernels, one after the other

# HLO that runs nothing: other names for arrays that are in memory already.
_NAMES = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "partition-id"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel."""

    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    accesses: dict[tuple[str, int], int]  # (ld or st, bytes) to accesses of memory in the PTX
    opcodes: dict[str, int] | None  # of the machine code; None without nvdisasm

    @property
    def warps(self) -> int:
        """Warps that a multiprocessor holds at once."""
        of_registers = REGISTERS // SCHEDULERS // (-(-self.registers // 8) * 8 * LANES) * SCHEDULERS
        block = self.threads // LANES
        blocks = min(of_registers // block, SHARED_BYTES // (self.shared_bytes + 1024))
        return min(WARPS, blocks * block)

    def vector_bytes(self, kind: str, at_least: int) -> int:
        """Return the bytes that a thread loads or stores by accesses of at least some size."""
        return sum(
            width * count
            for (its_kind, width), count in self.accesses.items()
            if its_kind == kind and width >= at_least
        )

    @property
    def barriers(self) -> int | None:
        """Barriers of all threads; None without nvdisasm."""
        if self.opcodes is None:
            return None
        return sum(count for opcode, count in self.opcodes.items() if opcode.startswith("BAR."))

    def pipes(self) -> dict[str, int] | None:
        """Count instructions by the pipe that runs them; None without nvdisasm."""
        if self.opcodes is None:
            return None
        counts = dict.fromkeys([*_PIPES, "other"], 0)
        for opcode, count in self.opcodes.items():
            counts[pipe_of(opcode)] += count
        return counts


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    pallas: bool
    matmul: bool = False
    scope: str = ""  # the name that JAX gave it
    body: str | None = None  # of a loop: the computation that it repeats
    turns: int = 1  # of a loop, where they are known

    @property
    def backward(self) -> bool:
        """Whether it is of a gradient."""
        return "transpose(jvp(" in self.scope

    @property
    def runs(self) -> bool:
        """Whether anything happens on the device."""
        return self.opcode not in _NAMES


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: instructions by computation, in the order in which they run."""

    computations: dict[str, list[Instruction]]
    entry: str
    sources: list[str]  # PTX
    shared_bytes: dict[str, int]  # by the name of a kernel

    @functools.cached_property
    def kernels(self) -> list[Kernel]:
        """Its kernels, through the assembler, which takes a while for many."""
        return [_assemble(ptx, self.shared_bytes) for ptx in self.sources if ".entry" in ptx]


def prepare(dump: Path) -> None:
    """Let the compiler write its results to `dump`. Call it before JAX does anything else.

    Raises:
      SystemExit: packages are missing.
    """
    missing = [name for name in (*_PLUGIN, *_COMPILER) if _version(name) is None]
    version = _version("jax")
    for name in _PLUGIN:
        if name not in missing and _version(name) != version:
            missing.append(f"{name}=={version} (there is {_version(name)})")
    if missing:
        raise SystemExit(
            f"To compile for an H200, {', '.join(missing)} must be installed: {INSTALL}"
        )
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # or it warns of sorts that no GPU was asked about
    flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    for what in ("PTX", "RESOURCES"):  # printed; into a folder it would be far more than these
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    jax.config.update("jax_platforms", "cpu")


def mesh(devices: int, axis: str) -> Mesh:
    """Make a mesh of H200 on one host."""
    return topologies.make_mesh(_topology(1, devices), (devices,), (axis,))


def mesh_of_hosts(axes: dict[str, int]) -> Mesh:
    """Make a mesh of H200 on several hosts, along the first of two axes, with their sizes."""
    hosts, devices = axes.values()
    shaped = np.array(_topology(hosts, devices).devices).reshape(hosts, devices)
    return Mesh(shaped, tuple(axes), axis_types=(AxisType.Auto,) * 2)


def _topology(hosts: int, devices: int) -> Any:
    """Describe hosts of some H200 each."""
    return topologies.get_topology_desc(
        platform="cuda", target_config=_as_proto(_TARGET), topology=f"1x{hosts}x{devices}"
    )


def compile_for(
    where: Mesh,
    function: Callable[..., Any],
    args: Sequence[Any],
    specs: Sequence[Any] | None = None,
    *,
    dump: Path,
) -> Program:
    """Compile a function for a mesh.

    Args:
      where: the mesh.
      function: function of `args`.
      args: trees of `jax.ShapeDtypeStruct`.
      specs: partition of each argument, or of each of its leaves; None for whole arguments on all
        devices.
      dump: folder that `prepare` was given.
    """
    specs = specs or [PartitionSpec()] * len(args)
    placed = [
        jax.tree.map(
            lambda leaf, of_leaf: leaf.update(sharding=NamedSharding(where, of_leaf)),
            arg,
            jax.tree.broadcast(spec, arg),
        )
        for arg, spec in zip(args, specs, strict=True)
    ]
    of_mosaic = dump / _MOSAIC
    with jax.sharding.use_abstract_mesh(where.abstract_mesh), _printing_to(of_mosaic):
        lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",))
        text = lowered.compile().as_text()
    shared = _shared_memory(dump)
    sources = [path.read_text() for path in sorted(dump.glob("*.ptx"))]
    sources += re.split(r"^(?=\.version )", of_mosaic.read_text(), flags=re.MULTILINE)
    for path in dump.iterdir():
        path.unlink()
    return Program(*_read_hlo(text), sources, shared)


def size_of(shape: str) -> int:
    """Return the bytes of the arrays in the text of a shape."""
    total = 0
    for dtype, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        items = math.prod(int(size) for size in dimensions.split(",") if size)
        total += items * (int(bits.group()) // 8 if bits else 1)
    return total


def pipe_of(opcode: str) -> str:
    """Return the pipe that runs an instruction."""
    for pipe, names in _PIPES.items():
        if f"{opcode}.".startswith(tuple(names.split())):
            return pipe
    return "other"


def busiest(pipes: dict[str, float]) -> float:
    """Return the issue slots that instructions take at least: all of them, or those of the busiest
    pipe.
    """
    return max(sum(pipes.values()), *(_SLOTS.get(pipe, 1) * n for pipe, n in pipes.items()))


def instructions_per_byte() -> float:
    """Return how many instructions all lanes together can issue while memory moves one byte."""
    issued = MULTIPROCESSORS * SCHEDULERS * LANES * CLOCK_GHZ
    return issued / MEMORY_GBYTES_PER_SECOND


def _assemble(ptx: str, shared: dict[str, int]) -> Kernel:
    name, target = (_find(pattern, ptx) for pattern in (r"\.entry (\w+)", r"\.target (\w+)"))
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        assembler = _tool("nvidia-cuda-nvcc", "ptxas")
        report = _run(assembler, "-v", f"-arch={target}", source, "-o", binary).stderr
        disassembler = _tool("nvidia-cuda-nvdisasm", "nvdisasm")
        sass = _run(disassembler, "-c", binary).stdout if disassembler else None
    opcodes = None
    if sass is not None:
        opcodes_in_order = re.findall(
            r"^\s*/\*\w{4,}\*/\s+(?:@!?U?P\w+ +)?([A-Z][\w.]*)", sass, re.MULTILINE
        )
        opcodes = dict(collections.Counter(opcodes_in_order).most_common())
        opcodes.pop("NOP", None)  # padding behind the end
    accesses: collections.Counter[tuple[str, int]] = collections.Counter()
    pattern = r"\b(ld|st)(?:\.\w+)*?\.global(?:[.:]\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b"
    for kind, count, bits in re.findall(pattern, ptx):
        accesses[kind, int(count or 1) * int(bits) // 8] += 1
    spills = sum(int(size) for size in re.findall(r"(\d+) bytes spill", report))
    return Kernel(
        threads=int(_find(r"\.(?:req|max)ntid (\d+)", ptx)),
        registers=int(_find(r"Used (\d+) registers", report)),
        spill_bytes=spills,
        shared_bytes=shared.get(name, 0),
        accesses=dict(accesses),
        opcodes=opcodes,
    )


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Redirect everything that this process prints, by Python or not."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _shared_memory(dump: Path) -> dict[str, int]:
    """Return bytes by the name of a kernel: they are given at launch, not to the assembler."""
    bytes_of: dict[str, int] = {}
    for path in dump.glob("*thunk_sequence.txt"):
        pattern = r"(\w+) grid: .*shared_memory: (\d+) bytes"
        bytes_of |= {name: int(size) for name, size in re.findall(pattern, path.read_text())}
    printed = (dump / _MOSAIC).read_text()
    names, sizes = (re.findall(p, printed) for p in (r"\.entry (\w+)", r"smem_scratch_bytes=(\d+)"))
    return bytes_of | {name: int(size) for name, size in zip(names, sizes, strict=True)}


def _read_hlo(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    head = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
    line_of = re.compile(r"^  (?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)")
    for line in text.splitlines():
        if start := head.match(line):
            name = start[2]
            entry = name if start[1] else entry
            computations[name] = []
        elif name and (match := line_of.match(line)):
            operands = tuple(re.findall(r"%([\w.\-]+)", match[4]))
            target = re.search(
                r'custom_call_target="(__gpu\$xla\.gpu\.triton|mosaic_gpu)', match[5]
            )
            pallas = match[3] == "custom-call" and target is not None
            body = re.search(r"body=%?([\w.\-]+)", match[5])
            scope = re.search(r'op_name="([^"]*)"', match[5])
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', match[5])
            computations[name].append(
                Instruction(
                    *match.group(1, 2, 3),
                    operands,
                    pallas,
                    matmul=bool(re.search(r'"__triton_(?:nested_)?gemm|"__cublas', match[5])),
                    scope=scope[1] if scope else "",
                    body=body and body[1],
                    turns=int(turns[1]) if turns else 1,
                )
            )
    return computations, entry


def _as_proto(fields: dict[str, Any]) -> str:
    """Return the text of a protocol buffer."""
    return "\n".join(
        f"{name} {{ {_as_proto(value)} }}" if isinstance(value, dict) else f"{name}: {value}"
        for name, value in fields.items()
    )


def _run(*command: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"No {pattern!r} in {text[:200]!r}: has its format changed?")
    return match[1]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _tool(package: str, name: str) -> str | None:
    """Return the path of a program of a package."""
    if _version(package) is None:
        return None
    files = importlib.metadata.files(package) or []
    return next((str(path.locate()) for path in files if path.name == name), None)
