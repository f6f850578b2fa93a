"""Predicted time of a step between hosts, from what was measured on one machine."""

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from dynamiq_jax._prediction.break_even import break_even_rate
from examples.llm.report import Run

LINKS = (0.2, 1.0, 10.0, 25.0, 100.0)  # Gbit/s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Times of a step whose workers are on hosts of their own.

    Nothing overlaps: a step computes, then encodes, then sends.
    """

    compute: float  # seconds of the exact step, without a network
    codec: float  # seconds that the compressed step takes longer, without a network
    exact_bytes: int  # that each worker sends, in float32
    compressed_bytes: int

    @staticmethod
    def of(exact: Run, compressed: Run, *, sharing: int) -> "Prediction":
        """Return the prediction from two runs on this machine.

        Args:
          exact: run with the exact mean.
          compressed: run with the compressed mean.
          sharing: workers that share the processors of this machine.
        """
        before, after = exact.summary()["step_seconds"], compressed.summary()["step_seconds"]
        return Prediction(
            compute=before / sharing,
            codec=max(after - before, 0.0) / sharing,
            exact_bytes=exact.wire.bytes_per_worker,
            compressed_bytes=compressed.wire.bytes_per_worker,
        )

    def seconds(self, gbit: float) -> tuple[float, float, float]:
        """Return the seconds of a step with float32, with bfloat16 and compressed, on a link."""
        rate = gbit * 1e9 / 8  # bytes a second
        return (
            self.compute + self.exact_bytes / rate,
            self.compute + self.exact_bytes / 2 / rate,
            self.compute + self.codec + self.compressed_bytes / rate,
        )

    @property
    def break_even(self) -> float:
        """Gbit/s below which the compressed step is faster than one with bfloat16."""
        sent, half = self.compressed_bytes, self.exact_bytes // 2
        return break_even_rate(self.codec, sent, 0.0, half) / 1e9


def table(predicted: Prediction, name: str, links: Sequence[float] = LINKS) -> Table:
    """Tabulate predicted times of a step on some links.

    Args:
      predicted: the prediction.
      name: of the compressed run.
      links: rates in Gbit/s.
    """
    limit = predicted.break_even
    if limit == 0:
        pays = "It sends no less than bfloat16, so that it pays on no link."
    elif limit == float("inf"):
        pays = "Its codec took no time that could be measured: it pays on every link."
    else:
        pays = f"With processors like these, it pays on links below {limit:.2g} Gbit/s."
    made = Table(
        title="Predicted time of a step between hosts, one for each worker",
        caption=f"Computation and codec as measured here, bytes over the rate of the link. {pays} "
        "For GPUs, ask dynamiq-jax advise.",
        min_width=72,
        caption_justify="left",
    )
    for heading in ("link", "float32", "bfloat16", name, "against bfloat16"):
        made.add_column(heading, justify="left" if heading == "link" else "right")
    for gbit in links:
        exact, half, compressed = predicted.seconds(gbit)
        times = (f"{seconds * 1e3:,.0f} ms" for seconds in (exact, half, compressed))
        made.add_row(f"{gbit:g} Gbit/s", *times, f"{half / compressed:.2f}x")
    return made
