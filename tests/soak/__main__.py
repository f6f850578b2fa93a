"""Run random programs of several collectives on real processes, and compare all replicas.

    python -m tests.soak                     20 minutes
    python -m tests.soak --minutes 2 --seed 1
    python -m tests.soak --round 1000017     one round again, which a failure has named

A round starts 2 or 3 processes with 1 or 2 CPU devices each, which run some programs of 2 to 4
collectives, and pause. A single process, with as many devices, runs them too. All of them have to
end with the same bits. What differs, hangs or fails is printed with the command that repeats its
round. The seed fixes the programs, and not how processes take turns: a hang may need several tries.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from rich.console import Console

from tests.soak import worker
from tests.soak.programs import Program, Round, random_round
from tests.support import processes, speed

PER_SEED = 1_000_000  # rounds
LONGEST = 1800.0  # seconds of a round


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="time of all rounds (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (0)")
    parser.add_argument("--round", type=int, help="number of the only round")
    parser.add_argument("--patience", type=float, default=120, help="longest time of a step (120)")
    options = parser.parse_args()
    os.environ |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(speed.QUICK)}
    console, deadline = Console(soft_wrap=True), time.monotonic() + 60 * options.minutes
    every = itertools.count(PER_SEED * options.seed)
    numbers = every if options.round is None else iter([options.round])
    count = failed = 0
    with console.status("") as status:
        for number in itertools.takewhile(lambda _: time.monotonic() < deadline, numbers):
            status.update(f"round {count + 1}, {failed} failures")
            round_ = random_round(number)
            problems = problems_of(round_, options.patience)
            count, failed = count + 1, failed + bool(problems)
            if problems:
                again = f"again: python -m tests.soak --round {number}"
                console.print(*problems, *round_.programs, again, sep="\n", markup=False)
    console.print(f"{count} rounds, {failed} failures")
    return int(failed > 0)


def problems_of(round_: Round, patience: float) -> list[str]:
    """Run a round, and say what was wrong."""
    arguments = (round_.seed, patience)
    try:
        with (
            processes.running(worker.run, [arguments], devices=round_.workers) as (alone,),
            processes.running(
                worker.run, [arguments] * round_.processes, devices=round_.devices
            ) as together,
        ):
            found = [process.result(LONGEST) for process in together]
            return list(differences(round_, found, alone.result(LONGEST)))
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return [str(error)]


def differences(
    round_: Round, of_processes: list[worker.Hashes], of_one: worker.Hashes
) -> Iterator[str]:
    """Yield what differs between replicas, and between all processes and a single one."""
    for (number, name), expected in of_one.items():
        found = [digest for process in of_processes for digest in process[number, name]]
        if found != expected:
            yield f"program {number}, {name} differs between processes and one process."
        kind, index = name.split()
        groups = replicas(round_.programs[number], int(index), round_) if kind == "result" else []
        for group in groups:
            if len({found[place] for place in group}) > 1:
                yield f"program {number}, {name} differs between replicas {group}."


def replicas(program: Program, number: int, round_: Round) -> list[list[int]]:
    """Return groups of workers that hold the same bits of a result."""
    each = program.collectives[number]
    workers = list(range(round_.workers))
    if each.kind == "psum_scatter":
        return []
    if set(each.axes) == set(program.mesh):
        return [workers]
    if each.axes == ("hosts",):
        return [workers[place :: round_.devices] for place in range(round_.devices)]
    return [workers[start : start + round_.devices] for start in workers[:: round_.devices]]


if __name__ == "__main__":
    sys.exit(main())
