"""Loading a checkpoint: peak memory of the process relative to the files, and bytes per second
beside plain reading of the same file.

    python -m benchmarks.training.checkpoint_loading

A random decoder of the shape of Llama 3.2 1B (2.5 GB in bfloat16) is written into a temporary
folder. Then fresh processes take turns, each after the file was dropped from the page cache:

- `load` loads it onto the default device;
- `read` reads the file through one small buffer: what storage can deliver;
- `keep` reads the file into memory that was never used before, as any loader has to.
"""

import dataclasses
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import common
from examples.llm.checkpoint import hf_name, load, named_leaves
from examples.llm.config import DecoderConfig, RopeScaling
from examples.llm.model import abstract_params

LLAMA_1B = DecoderConfig(
    family="llama",
    vocabulary=128_256,
    width=2048,
    mlp_width=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling("llama3", 32.0),
    tie_embeddings=True,
    max_positions=131_072,
)
BUFFER_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    repeats: int = 3  # processes of each kind; the median time and the highest peak count
    directory: Path | None = None  # where the temporary folder goes; the storage to measure
    save: bool = True  # write the result to benchmarks/results/checkpoint_loading.json


def write_random(folder: Path, config: DecoderConfig) -> Path:
    """Write a bfloat16 checkpoint of small random numbers, one tensor in memory at a time."""
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    shapes = {
        hf_name(name, config.family): leaf.shape
        for name, leaf in named_leaves(abstract_params(config))
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            bits = rng.integers(2**16, size=shape, dtype=np.uint16)
            file.write((bits & 0x807F | 0x3C00).data)  # magnitudes from 2^-7 to 2^-6
    return path


def load_file(path: Path) -> None:
    """Load the folder of a file and wait for its parameters."""
    jax.block_until_ready(load(path.parent))


def read_file(path: Path) -> None:
    """Read a file and forget it."""
    buffer = bytearray(BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def keep_file(path: Path) -> None:
    """Read a file into memory."""
    path.read_bytes()


def measured(work: Callable[[Path], None], path: Path) -> tuple[float, int]:
    """Return seconds, and the highest resident memory that this process ever had, in bytes."""
    jax.block_until_ready(jax.numpy.zeros(1))  # The start of JAX is not what is measured.
    with path.open("rb") as file:
        os.fsync(file.fileno())  # Pages that were not written yet cannot be dropped.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    work(path)
    seconds = time.perf_counter() - start
    # `getrusage` would count the parent's memory.
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return seconds, 1024 * peak


def main(config: Config) -> None:
    kinds = {"load": load_file, "read": read_file, "keep": keep_file}
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in kinds}
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=config.directory) as folder:
        path = write_random(Path(folder), LLAMA_1B)
        size = path.stat().st_size
        for _ in range(config.repeats):
            for name, work in kinds.items():
                with fresh.Pool(1) as process:
                    runs[name].append(process.apply(measured, (work, path)))
    table = Table("", "GB/s", "seconds", "peak / file")
    results = {"file_bytes": size}
    for name, measurements in runs.items():
        seconds = [seconds for seconds, _ in measurements]
        peak = max(peak for _, peak in measurements)
        results[name] = {
            "seconds": seconds,
            "gb_per_s": size / statistics.median(seconds) / 1e9,
            "peak_bytes": peak,
            "peak_ratio": peak / size,
        }
        found = results[name]
        table.add_row(
            name,
            f"{found['gb_per_s']:.2f}",
            f"{statistics.median(seconds):.1f}",
            f"{found['peak_ratio']:.2f}",
        )
    Console().print(table)
    if config.save:
        kept = {"repeats": config.repeats, "model": dataclasses.asdict(LLAMA_1B)}
        print("wrote", common.save("checkpoint_loading", kept, results))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
