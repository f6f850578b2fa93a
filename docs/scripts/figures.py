"""Figures of the README, methods/dynamiq.md and recipes/compress.md, drawn from the library.

python -m docs.scripts.figures
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from matplotlib import pyplot as plt

import dynamiq_jax as dq
from docs.scripts.compressed_step import compressed_step
from docs.scripts.first_figure import first_figure
from dynamiq_jax._core import Axis, LocalChunks, RecodedChunks
from dynamiq_jax.topologies import AllToAll, Butterfly, Ring
from pallas_kernels import operations
from pallas_kernels.codec.levels import make_levels, num_levels
from pallas_kernels.codec.packing import MAX_WIDTH
from pallas_kernels.codec.rounding import offsets
from pallas_kernels.codec.scales import bfloat16_bits

FIGURES = Path(__file__).parents[1] / "figures"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "svg.fonttype": "none",  # letters, not outlines: a tenth of the size
    "svg.hashsalt": "dynamiq-jax",  # the same file every time
}


def levels() -> plt.Figure:
    """Draw the levels of codes of 2 to 5 bits."""
    figure, axes = plt.subplots(figsize=(7, 2.4))
    for width in (2, 3, 4, 5):
        codes = jnp.arange(num_levels(width) + 1, dtype=jnp.float32)
        positions = np.asarray(
            make_levels(width, "quadratic", dq.DynamiQ().gap_ratio).position(codes)
        )
        both = np.concatenate([-positions[:0:-1], positions])
        axes.plot(both, np.full(both.shape, width), "|", ms=16, mew=1.5)
    axes.set(xlabel="value over the scale of its group", ylabel="bits of a code")
    axes.set(yticks=(2, 3, 4, 5), ylim=(1.5, 5.5))
    return figure


def sorted_norms(spread: float) -> Array:
    """Draw a gradient and return the norms of its super-groups, largest first.

    Args:
      spread: standard deviation of the log2 of their scales; 0 is white noise.
    """
    generator = np.random.default_rng(0)
    scales = np.exp2(spread * generator.standard_normal((4096, 1)))
    rows = scales * generator.standard_normal((4096, 256))
    return jnp.sort(operations.by().statistics(jnp.asarray(rows, jnp.float32)), descending=True)


def shares_of_widths(norms: Array) -> dict[int, float]:
    """Return width to the share of the super-groups that gets it, from sorted norms."""
    layout = dq.DynamiQ(bits=5.0).layout(256 * norms.size, 1)
    energies = (bfloat16_bits(norms) >> 1).astype(jnp.int32)
    rows = [norms.size, *np.asarray(layout.allocation.solve(energies, layout.units)), 0]
    counts = {width: int(rows[width] - rows[width + 1]) for width in reversed(range(MAX_WIDTH + 1))}
    return {width: count / norms.size for width, count in counts.items() if count}


def allocation() -> plt.Figure:
    """Draw the norms of super-groups, and the share of them that gets each width."""
    figure, (lines, bars) = plt.subplots(1, 2, figsize=(8, 3), width_ratios=(2, 3))
    names = {0.0: "white noise", 1.0: "1 octave", 2.0: "2 octaves", 4.0: "4 octaves"}
    for index, (spread, name) in enumerate(names.items()):
        norms = sorted_norms(spread)
        log2_norms = np.log2(norms / jnp.median(norms))
        lines.plot((np.arange(norms.size) + 0.5) / norms.size, log2_norms, label=name)
        left = 0.0
        for width, share in shares_of_widths(norms).items():
            color = plt.get_cmap("viridis")(1 - width / 16)
            bars.barh(index, share, left=left, height=0.7, color=color, edgecolor="white")
            if share > 0.04:
                middle, color = left + share / 2, "w" if width > 6 else "k"
                bars.text(middle, index, str(width), ha="center", va="center", color=color)
            left += share
    lines.set(xlabel="super-groups, largest first", ylabel="log2 of the norm (median 0)")
    lines.legend(frameon=False, title="spread")
    bars.set(xlabel="share of the super-groups, by width; bits=5")
    bars.set_yticks(range(len(names)), list(names.values()))
    bars.invert_yaxis()
    return figure


def ring_paths(workers: int) -> np.ndarray:
    """Return the worker that makes each hop of each chunk in a ring: float32 [chunks, hops]."""

    def all_reduce(_: Array) -> Array:
        me = lax.axis_index("data").astype(jnp.float32)
        codec = RecodedChunks(
            local=LocalChunks(jnp.zeros((workers, workers)), size=workers * workers),
            encode=lambda values, chunk, turn: values.at[turn].set(me),
            decode=lambda payload, chunk: payload,
        )
        return Ring().all_reduce(codec, Axis("data", workers)).decode()

    paths = jax.vmap(all_reduce, axis_name="data")(jnp.zeros(workers))[0]
    return np.asarray(paths).reshape(workers, workers)


def ring() -> plt.Figure:
    """Draw the worker that has the partial sum of each chunk after every hop."""
    workers = 5
    figure, axes = plt.subplots(figsize=(7, 3))
    for chunk, visited in enumerate(ring_paths(workers)):
        # A line for each chunk, broken where the ring closes.
        line = visited.copy()
        wraps = np.flatnonzero(np.diff(line) < 0) + 1
        hops = np.insert(np.arange(workers, dtype=float), wraps, np.nan)
        axes.plot(hops, np.insert(line, wraps, np.nan), color=f"C{chunk}", lw=2)
        axes.plot(range(workers), visited, "o", ms=17, color=f"C{chunk}", label=f"chunk {chunk}")
        for hop, worker in enumerate(visited):
            axes.text(hop, worker, str(hop + 1), ha="center", va="center", color="white")
    axes.set(xlabel="hop", ylabel="worker", xticks=range(workers), yticks=range(workers))
    axes.set(xlim=(-0.4, workers + 0.9))
    axes.legend(frameon=False, loc="center right", markerscale=0.4)
    return figure


def rounding() -> plt.Figure:
    """Draw the offsets of one coordinate at the hops of its path."""
    figure, rows = plt.subplots(2, 1, figsize=(7, 2.6), sharex=True)
    seed = jnp.array([1, 2], jnp.uint32)
    row_ids = jnp.arange(1, dtype=jnp.uint32)
    for axes, kind in zip(rows, ("independent", "correlated"), strict=True):
        for hop in range(8):
            offset = np.asarray(offsets(row_ids, hop, seed, kind))[0, 3]
            axes.plot(offset, 0, "o", ms=14, color="C0")
            axes.text(offset, 0, str(hop), ha="center", va="center", color="white")
        axes.set(yticks=(), ylabel=kind, xlim=(0, 1))
        axes.spines.left.set_visible(False)
    rows[-1].set(xlabel="offset of one coordinate at hops 0 to 7")
    return figure


def error() -> plt.Figure:
    """Draw the vNMSE of a sum over that of one compression, on more and more workers."""
    figure, axes = plt.subplots(figsize=(7, 3))
    counts = [2**power for power in range(1, 9)]
    for topology in (Ring(), Butterfly(), AllToAll()):
        growth = [topology.error_growth(n, agreement=0.1) for n in counts]
        axes.loglog(counts, growth, "o-", label=type(topology).__name__, base=2)
    axes.set(xlabel="workers", ylabel="vNMSE, one compression = 1")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return figure


def main() -> None:
    """Draw all figures."""
    plt.switch_backend("agg")
    with plt.rc_context(STYLE):
        for draw in (levels, allocation, ring, rounding, error, compressed_step, first_figure):
            figure = draw()
            figure.savefig(FIGURES / f"{draw.__name__}.svg", metadata={"Date": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
