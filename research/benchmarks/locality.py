"""Locality of gradients: what chunked top-k loses if coordinates are in a random order.

    python -m benchmarks.error.dump_gradients --workers 64 --output gradients.npz
    python -m research.benchmarks.locality --gradients gradients.npz

`TopKChunked` sums whole blocks. This pays only if large coordinates lie close together. The
ablation of "Beyond Throughput and Compression Ratios" (arXiv 2407.01378) permutes the gradient:
blocks of neighbors become blocks of random coordinates. Top-k of single coordinates does not depend
on the order. It is the bound for all block sizes, and would need indices on the wire.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import Ring
from dynamiq_research import TopKChunked


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path  # that benchmarks.error.dump_gradients wrote
    workers: int = 8
    bits: tuple[float, ...] = (1.0, 2.0, 4.0)
    block_sizes: tuple[int, ...] = (64, 256, 1024)
    save: bool = True  # write the result to research/benchmarks/results/locality.json


def error(method: TopKChunked, flat: NDArray[np.float32]) -> float:
    """Return the vNMSE of a sum over the workers of [workers, size]."""

    def local(values: jax.Array) -> jax.Array:
        return dq.psum(values, "data", key=jax.random.key(0), method=method)

    total = np.asarray(jax.jit(jax.vmap(local, axis_name="data"))(flat)[0], np.float64)
    truth = flat.sum(axis=0, dtype=np.float64)
    return float(np.sum((total - truth) ** 2) / np.sum(truth**2))


def share_left_out(flat: NDArray[np.float32], coordinates: int) -> float:
    """Return the energy of the sum without its largest coordinates: the least possible error."""
    energy = np.sort(flat.sum(axis=0, dtype=np.float64) ** 2)
    return float(energy[:-coordinates].sum() / energy.sum())


COLUMNS = (
    Column("", "step"),
    Column("bits", "bits", "{:g}"),
    Column("block", "block_size"),
    Column("in order", "in_order", "{:.2f}"),
    Column("permuted", "permuted", "{:.2f}"),
    Column("as many coordinates", "coordinates", "{:.2f}"),
)


@benchmark("research/locality")
def main(config: Config) -> Report:
    """Measure every case."""
    rng = np.random.default_rng(0)
    results: list[dict[str, Any]] = []
    for step, leaves in track(gradient_files.load(config.gradients).items(), transient=True):
        flat = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves.values()], axis=1)
        flat = flat[: config.workers]
        permuted = flat[:, rng.permutation(flat.shape[1])]
        for bits in config.bits:
            for block_size in config.block_sizes:
                method = TopKChunked(bits=bits, block_size=block_size)
                call = Call(size=flat.shape[1], axis=Axis("data", config.workers), topology=Ring())
                row = {"step": step, "bits": bits, "block_size": block_size}
                results.append(
                    row
                    | {
                        "in_order": error(method, flat),
                        "permuted": error(method, permuted),
                        "coordinates": share_left_out(flat, method.num_chosen(call) * block_size),
                    }
                )
    return Report(
        results=results,
        shown=[table("vNMSE of top-k of blocks", COLUMNS, results)],
        options=files.options_of(config) | {"gradients": config.gradients.name},
    )


if __name__ == "__main__":
    run(main, __doc__)
