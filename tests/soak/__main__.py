"""Run random programs of several collectives on real processes, and compare all replicas.

    python -m tests.soak                     20 minutes
    python -m tests.soak --minutes 2 --seed 1
    python -m tests.soak --round 1000017     one round again, which a failure has named
    python -m tests.soak --round 1000017 --times 20

A round starts 2 or 3 processes with 1 or 2 CPU devices each, which run some programs of 2 to 4
collectives. Processes pause, and in some rounds one is killed: then all start again from their last
checkpoint. Each program also runs in a single process, with as many devices. All of them have to
end with the same bits. What differs, hangs or fails is printed with the command that repeats its
round. The seed fixes the programs, and not how processes take turns: a hang may need several tries.
"""

import argparse
import dataclasses
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.soak.programs import random_round
from tests.soak.rounds import Counts, RunningRound

PER_SEED = 1_000_000  # rounds


def parsed() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="time of all rounds (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (0)")
    parser.add_argument("--round", type=int, help="number of the only round")
    parser.add_argument("--times", type=int, default=1, help="how often to run --round (1)")
    parser.add_argument(
        "--patience", type=float, default=60, help="seconds without a step that are a hang (60)"
    )
    parser.add_argument("--logs", type=Path, help="folder of the logs of rounds that failed")
    options = parser.parse_args()
    if options.minutes <= 0 or options.patience <= 0 or options.times < 1:
        parser.error("--minutes, --patience and --times are more than 0.")
    if options.logs and options.logs.exists() and any(options.logs.iterdir()):
        parser.error(f"--logs {options.logs} is not empty. Give a new folder.")
    return options


def rounds(options: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of rounds, until the time is over."""
    if options.round is not None:
        yield from [options.round] * options.times
        return
    deadline = time.monotonic() + 60 * options.minutes
    for number in itertools.count(PER_SEED * options.seed):
        if time.monotonic() >= deadline:
            return
        yield number


def main() -> int:
    options = parsed()
    console = Console(soft_wrap=True)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    counts, failed, start = Counts(), list[int](), time.monotonic()
    of_one = options.round is not None
    total = options.times if of_one else 60 * options.minutes
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("round 1", total=total)
        for place, number in enumerate(rounds(options)):
            round_ = random_round(number)
            running = RunningRound(round_, folder / f"{place}-{number}", options.patience)
            running.run()
            counts.add(running.counts)
            if running.problems:
                report(console, running)
                failed.append(number)
            done = place + 1 if of_one else time.monotonic() - start
            text = f"round {place + 2}, {counts.kills} kills, {len(failed)} failures"
            progress.update(task, completed=min(done, total), description=text)
    console.print(table(counts, time.monotonic() - start))
    return int(bool(failed))


def report(console: Console, running: RunningRound) -> None:
    for problem in running.problems:
        console.print(problem, markup=False)
    for program in running.round.programs:
        console.print(program, markup=False)
    console.print(f"logs: {running.folder}", markup=False)
    console.print(f"again: python -m tests.soak --round {running.round.seed}", markup=False)


def table(counts: Counts, seconds: float) -> Table:
    shown = Table("count", "number", title=f"{seconds / 60:.1f} minutes")
    for name, value in dataclasses.asdict(counts).items():
        shown.add_row(name, f"{value:,}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
