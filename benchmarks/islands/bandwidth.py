"""Time to a loss of islands over links of many bandwidths, beside plain steps.

    python -m benchmarks.islands.bandwidth
    python -m benchmarks.islands.bandwidth --size 7G --step-time 4

Nothing is trained here. Rounds to a loss are those of `islands.sparse`, times of messages those of
`islands.codec`, and the steps of a run with an all-reduce in every step those of `islands.links`,
as `dynamiq-jax advise` has them. Times are relative to a round of exact messages that take no time.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax._console.units import format_rate, parse_size
from dynamiq_jax._prediction.islands import (
    SPARSE_KINDS,
    LinkTime,
    MessageKind,
    faster_from,
    island_rounds,
    plain_time,
)

RATES = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10)  # bits a second
PLAIN = "4 bits in every step"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: str = "1G"  # parameters
    islands: int = 4
    every: int = 30  # local steps of a round
    step_time: float = 1.0  # seconds of a local step
    save: bool = True  # write the result to benchmarks/results/islands_bandwidth.json

    @property
    def seconds(self) -> float:
        """Seconds of the local steps of a round."""
        return self.every * self.step_time


def times(config: Config) -> dict[str, LinkTime]:
    """Return the time of each setting."""
    size, seconds = parse_size(config.size, "--size"), config.seconds
    kinds = (*SPARSE_KINDS, MessageKind(4.0), MessageKind(32.0, 1.0, 0.5))
    rounds = [
        island_rounds(size, config.islands, kind, seconds, math.inf, on_cpu=True) for kind in kinds
    ]
    plain = plain_time(size, config.islands, 4.0, config.every, seconds)
    return {f"{each.message.bits:.2g} bits": each.to_loss for each in rounds} | {PLAIN: plain}


def plot(config: Config) -> plt.Figure:
    """Draw the times of all settings over the bandwidth."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    rates = np.geomspace(RATES[0], RATES[-1], 200)
    for name, time in times(config).items():
        style = "--" if name == PLAIN else "-"
        axis.plot(rates, [time.on(rate) / config.seconds for rate in rates], style, label=name)
    axis.set(xscale="log", yscale="log", ylim=(0.5, 50), xlabel="bits a second of each island")
    axis.set(ylabel="time to a loss, in rounds of exact messages\nthat take no time")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


@benchmark("islands_bandwidth")
def main(config: Config) -> Report:
    """Compare all settings."""
    found = times(config)
    rows: list[dict[str, Any]] = [
        {
            "rate": rate,
            "times": {name: time.on(rate) / config.seconds for name, time in found.items()},
            "first": min(found, key=lambda name, rate=rate: found[name].on(rate)),
        }
        for rate in RATES
    ]
    islands = [time for name, time in found.items() if name != PLAIN]
    columns = [
        Column("link", lambda row: format_rate(row["rate"])),
        *(Column(name, ("times", name), "{:.2f}") for name in found),
        Column("first", "first"),
    ]
    plain_from = faster_from(found[PLAIN], islands)
    line = f"{PLAIN} is the first from {format_rate(plain_from)} on"
    return Report(
        results={"rows": rows, "plain_from": plain_from},
        shown=[table("Time to a loss", columns, rows, line)],
        draw=lambda: plot(config),
    )


if __name__ == "__main__":
    run(main, __doc__)
