"""Options and table of `python -m benchmarks.speed.tune_buckets`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.table import Table

from benchmarks.harness.columns import Column, table
from benchmarks.speed.tune_buckets import steps
from benchmarks.speed.tune_buckets.tuner import BucketTrial, StepTimer, tune_bucket_bytes
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_seconds, parse_size


@dataclasses.dataclass(frozen=True)
class TuneBuckets:
    """Bucket size with the shortest training step, measured on your own step.

    STEP names a function of the bucket size in bytes that returns a function of one training step:

      def make_step(bucket_bytes):
          method = dq.Compression(bucket_bytes=bucket_bytes)
          step = dq.compress(train_step, "data", method=method)
          ...
          def run():                      # takes one step, and returns something to wait for
              nonlocal state
              state, loss = step(state, batch)
              return loss
          return run

    Each size is compiled. Sizes on a logarithmic grid come first, then some between the neighbors
    of the best. Run it where you train, with all processes: the best size depends on the link.
    """

    step: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE:FUNCTION")]
    """Function that makes a step for a bucket size; found in the working directory too."""

    low: str = "1Mi"
    """Smallest size in bytes."""

    high: str = "128Mi"
    """Largest size in bytes. Above the bytes of all gradients nothing changes."""

    candidates: int = 8
    """Sizes on the grid."""

    rounds: int = 2
    """Sizes after the grid, by golden section around the best."""

    warmup: int = 2
    """Steps of each size that are not timed; the first one compiles."""

    steps: int = 5
    """Steps of each size that are timed. Their median counts."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all times to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw the time of a step against the bucket size (.png, .svg, .pdf)."""

    def run(self) -> int:
        """Print a table of all sizes; return the exit status."""
        low, high = parse_size(self.low, "--low"), parse_size(self.high, "--high")
        if low >= high:
            raise CommandError(f"--low is {self.low} and --high {self.high}: give a larger --high.")
        for name, least in (("candidates", 2), ("rounds", 0), ("warmup", 0), ("steps", 1)):
            options.check_range(f"--{name}", getattr(self, name), least)
        options.check_outputs(self.json, self.plot)
        factory = steps.find_factory(self.step)
        is_first = jax.process_index() == 0
        console = tables.console(quiet=not is_first)
        timer = StepTimer(warmup=self.warmup, steps=self.steps)
        count = self.candidates + self.rounds
        with tables.progress(console, "tune-buckets", count) as advance:

            def seconds_of(size: int) -> float:
                seconds = timer(steps.make_step(factory, size))
                advance(f"{_mib(size)}: {format_seconds(seconds)}")
                return seconds

            trials = tune_bucket_bytes(
                seconds_of, low=low, high=high, candidates=self.candidates, rounds=self.rounds
            )
        console.print(_table(trials))
        console.print(f"dq.Compression(bucket_bytes={trials[0].bucket_bytes})")
        if is_first:
            results = {"trials": [trial._asdict() for trial in trials]}
            records.keep(self, jax.devices()[0].device_kind, results)
            if self.plot is not None:
                steps.save_plot(self.plot, trials)
        return 0


def _table(trials: tuple[BucketTrial, ...]) -> Table:
    best = trials[0]

    def against_best(trial: BucketTrial) -> str:
        return "best" if trial is best else f"+{trial.seconds / best.seconds - 1:.1%}"

    columns = (
        Column("bucket size", lambda trial: _mib(trial.bucket_bytes)),
        Column("time of a step", lambda trial: format_seconds(trial.seconds)),
        Column("against the best", against_best),
    )
    return table("Time of a step by bucket size", columns, sorted(trials))


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"
