"""Entropy of codes on the wire: of THC's sums, which `EntropyCoded` sends in fewer bits, and of the
codes of DynamiQ and of block integers, which it could.

    python -m benchmarks.error.dump_gradients --workers 64 --output gradients.npz
    python -m research.benchmarks.entropy --gradients gradients.npz

The integers of THC come from a program, and are summed here in the order of a ring. `EntropyCoded`
runs as in training, with all workers on one device: its sums are compared with those of THC, and
its metrics say whether all messages fit. Beside real gradients there are normal coordinates, of
which workers have none or half of the energy in common.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table

from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax.methods import Axis, BlockInt, Call, DynamiQ
from dynamiq_jax.topologies import AllToAll, Ring, Topology
from dynamiq_research import THC, EntropyCoded
from pallas_kernels.codec import SUPER_GROUP_SIZE, l2_norm, place_rows
from pallas_kernels.codec.rounding import offsets
from pallas_kernels.codec.rows import encode_rows
from pallas_kernels.codec.scales import bfloat16_bits

Values = NDArray[np.float32]
TOPOLOGIES: dict[str, Topology] = {"ring": Ring(), "all_to_all": AllToAll()}
KEY = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    gradients: Path  # that benchmarks.error.dump_gradients wrote
    workers: tuple[int, ...] = (8, 16, 64)
    agreements: tuple[float, ...] = (0.0, 0.5)  # budgets of `EntropyCoded`
    size: int = 2**19  # coordinates of a gradient, from its first on
    save: bool = True  # write the result to research/benchmarks/results/entropy.json


def inputs(config: Config) -> Iterator[tuple[str, Values]]:
    """Yield names and gradients, [workers, size]."""
    most = max(config.workers)
    for agreement in (0.0, 0.5):
        drawn = worker_gradients(most, config.size, 0, agreement=agreement, octaves=0.0)
        yield f"normal, {agreement:g} in common", drawn
    for step, leaves in gradient_files.load(config.gradients).items():
        flat = [leaf.reshape(len(leaf), -1) for leaf in leaves.values()]
        yield step, np.concatenate(flat, axis=1)[:most, : config.size]


def entropy(values: NDArray[np.integer]) -> float:
    """Return the bits of a value, if all are drawn alike."""
    counts = np.unique(values, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log2(share)).sum())


def call_of(flat: Values, topology: Topology) -> Call:
    """Return the call of a bucket of all workers."""
    return Call(size=flat.shape[1], axis=Axis("data", len(flat)), topology=topology)


def partial_sums(flat: Values) -> dict[str, Any]:
    """Return entropies of THC's partial sums, in the order of a ring."""
    call, thc = call_of(flat, Ring()), THC()

    def local(values: jax.Array) -> jax.Array:
        return thc.bind(values, call, jax.random.key(KEY)).encoded

    integers = np.asarray(jax.jit(jax.vmap(local, axis_name="data"))(flat))
    total, by_turn = np.zeros(integers.shape[1:], np.int16), []
    for each in integers:
        total += each
        by_turn.append(entropy(total))
    # Of n workers with a share of their energy in common, sums have n + share * n * (n - 1) times
    # the energy of one.
    n, energy = len(flat), float(np.mean(np.square(integers, dtype=np.float32)))
    share = (float(np.mean(np.square(total, dtype=np.float64))) / energy / n - 1) / (n - 1)
    return {
        "wire_bits": thc.wire_bits(n),
        "entropy": by_turn,
        "entropy_scattered": float(np.mean(by_turn[:-1])),
        "agreement": share,
    }


def coded(flat: Values, method: EntropyCoded, topology: Topology) -> dict[str, Any]:
    """Run an all-reduce, and return its bits and metrics, and whether its sums are those of THC."""
    call = call_of(flat, topology)

    def local(values: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        key = jax.random.key(KEY)
        ours = method.all_reduce(values, call, key, ())
        expected = method.inner.all_reduce(values, call, key, ()).total
        differ = jnp.mean((ours.total != expected).astype(jnp.float32))
        error = jnp.sum((ours.total - expected) ** 2) / jnp.sum(expected**2)
        return differ, error, dict(ours.metrics)

    differ, error, metrics = jax.jit(jax.vmap(local, axis_name="data"))(flat)
    sent = topology.bytes_sent(method.wire_cost(call), len(flat))
    passes = 2 * (len(flat) - 1) / len(flat)
    return {
        "bits": 8 * sent / (passes * flat.shape[1]),
        "same": not np.any(differ),
        "coarse_error": float(error[0]),
        **{name: float(metric[0]) for name, metric in metrics.items()},
    }


def code_entropy(values: NDArray[np.float32]) -> dict[str, float]:
    """Return bits saved of each code by entropy coding with a table for each width."""
    saved_bits = {}
    rows = jnp.asarray(values[: values.size // SUPER_GROUP_SIZE * SUPER_GROUP_SIZE]).reshape(
        -1, 256
    )
    for bits in (4, 5, 6):
        layout = DynamiQ(bits=bits).layout(rows.size, 1)
        norms = bfloat16_bits(l2_norm(rows, axis=1))
        places = place_rows(norms, layout).at(0)
        noise = offsets(
            jnp.arange(len(rows), dtype=jnp.uint32), 0, jnp.zeros(2, jnp.uint32), "independent"
        )
        levels = layout.quantizer.levels_of_rows(places.widths)
        codes, _, _ = encode_rows(rows[places.order], noise, levels, group_size=layout.group_size)
        codes = np.asarray(codes)
        codes = np.where(codes == 1, 0, codes)  # a zero has no sign
        widths, saved = np.asarray(places.widths), 0.0
        for width in np.unique(widths[widths > 0]):
            rows_of_width = codes[widths == width]
            saved += (width - entropy(rows_of_width)) * len(rows_of_width) / len(rows)
        saved_bits[f"dynamiq:{bits}"] = saved
    for code_bits in (4, 5, 8):
        codes, _ = BlockInt(code_bits=code_bits).encode_rows(rows, None)
        saved_bits[f"blockint:{code_bits}"] = code_bits - entropy(np.asarray(codes))
    return saved_bits


@benchmark("research/entropy")
def main(config: Config) -> Report:
    """Measure every case."""
    rows, codes = [], []
    coders = [("rans", agreement) for agreement in config.agreements]
    coders.append(("patched", config.agreements[0]))
    for name, flat in inputs(config):
        for workers in track(config.workers, f"Coding {name}", transient=True):
            row = {"gradients": name, "workers": workers} | partial_sums(flat[:workers])
            row["coded"] = [
                {"coder": coder, "agreement": agreement, "topology": topology}
                | coded(flat[:workers], EntropyCoded(agreement=agreement, coder=coder), route)
                for coder, agreement in coders
                for topology, route in TOPOLOGIES.items()
            ]
            rows.append(row)
        for summed, of in (("one worker", flat[:1]), ("sum of 8", flat[:8])):
            saved = code_entropy(of.sum(axis=0))
            codes.append({"gradients": name, "values": summed, "saved": saved})
    return Report(
        results={"sums": rows, "codes": codes},
        shown=[of_sums(rows), of_codes(codes)],
        options=files.options_of(config) | {"gradients": config.gradients.name},
    )


def of_sums(rows: list[dict[str, Any]]) -> Table:
    """Make a table with a line for each gradient, number of workers and code."""
    lines = [row | coded for row in rows for coded in row["coded"]]
    columns = (
        Column("gradients", "gradients"),
        Column("workers", "workers"),
        Column("sent", "wire_bits"),
        Column("entropy: scattered", "entropy_scattered", "{:.2f}"),
        Column("gathered", ("entropy", -1), "{:.2f}"),
        Column("coder", "coder"),
        Column("agreement", "agreement", "{:g}"),
        Column("topology", "topology"),
        Column("bits", "bits", "{:.2f}"),
        Column("filled", "filled", "{:.2f}"),
        Column("coarse", "coarse", "{:.0%}"),
        Column("error of these", "coarse_error", "{:.1e}"),
    )
    return table("Sums of THC at 4 bits", columns, lines)


def of_codes(codes: list[dict[str, Any]]) -> Table:
    """Make a table of the bits that entropy coding would save."""
    columns = [Column("gradients", "gradients"), Column("values", "values")]
    columns += [Column(name, ("saved", name), "{:.2f}") for name in codes[0]["saved"]]
    return table("Bits of a coordinate that entropy coding would save", columns, codes)


if __name__ == "__main__":
    run(main, __doc__)
