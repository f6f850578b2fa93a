"""A round, seen from outside: starts its processes, watches and kills them, and compares hashes."""

import contextlib
import dataclasses
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.soak.programs import Kill, Program, Round
from tests.support import speed
from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
GRACE = 3.0  # seconds between SIGTERM and SIGKILL
SURVIVAL = 5.0  # seconds in which the others may end by themselves after a kill
WORKS = 0.05  # part of a core that processes use at least which do not wait for each other
DUMP = 1.0  # seconds in which a process writes its stacks
REFERENCE = "the reference"


class Failure(Exception):
    """A round did not end as it should."""


@dataclasses.dataclass
class Counts:
    """Figures of one round or of several."""

    rounds: int = 0
    programs: int = 0
    collectives: int = 0
    steps: int = 0
    kills: int = 0
    restarts: int = 0
    hashes: int = 0  # that were compared
    differ: int = 0
    hangs: int = 0
    errors: int = 0

    def add(self, other: "Counts") -> None:
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class Running:
    """Processes of one start, whose events arrive in one queue as (name, event)."""

    def __init__(self, folder: Path, *, optimized: bool):
        self.folder, self.optimized = folder, optimized
        self.events: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: object) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "JAX_PLATFORMS": "cpu",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(not self.optimized)),
            "XLA_FLAGS": "" if self.optimized else " ".join(speed.QUICK),
        }
        with open(self.log(name), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.worker", *map(str, arguments)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.processes[name] = process
        threading.Thread(target=self._listen, args=(name, process), daemon=True).start()

    def log(self, name: str) -> Path:
        return self.folder / f"{name.replace(' ', '_')}.log"

    def last_error(self, name: str) -> str:
        """Return the last error of Python in a log, and otherwise its last line."""
        lines = self.log(name).read_text(errors="replace").strip().splitlines() or ["nothing"]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (errors or lines)[-1][:300]

    def _listen(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # gloo prints, and a kill cuts a line
                self.events.put((name, json.loads(line)))
        process.wait()
        self.events.put((name, None))

    def seconds_of_work(self) -> float:
        """Return the CPU time of the processes that are left; 0 where the system has no /proc."""
        ticks = 0
        for process in self.processes.values():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{process.pid}/stat").read_text()
                ticks += sum(map(int, text.rpartition(")")[2].split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def dump(self) -> None:
        """Let all processes write the stacks of their threads to their logs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(DUMP)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


class RunningRound:
    """One round from its start to its end.

    Args:
      round_: programs, processes and the kill.
      folder: place of checkpoints and logs; it stays only after a failure.
      patience: seconds without any event after which the round hangs.
    """

    def __init__(self, round_: Round, folder: Path, patience: float):
        self.round, self.folder, self.patience = round_, folder, patience
        self.counts = Counts(rounds=1)
        self.names = [f"process {rank}" for rank in range(round_.processes)]
        # Hashes by (program, name of the result), and then by process.
        self.hashes: dict[tuple[int, str], dict[str, list[str]]] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        """Run it to its end. `problems` says what was wrong."""
        self.folder.mkdir(parents=True)
        with self._running() as reference:
            reference.start(REFERENCE, self.round.seed, 0, 0, 1, self.folder, 0, 0)
            try:
                if self._group(self.round.kill, (0, 0)):
                    self.counts.restarts += 1
                    self._group(None, self._newest())
                self._watch(reference, None)
                self.compare()
            except Failure as failure:
                self.problems.append(str(failure))
        if not self.problems:
            shutil.rmtree(self.folder)

    @contextlib.contextmanager
    def _running(self) -> Iterator[Running]:
        running = Running(self.folder, optimized=self.round.optimized)
        try:
            yield running
        finally:
            running.end()

    def _group(self, kill: Kill | None, place: tuple[int, int]) -> bool:
        """Start all processes from a place; return whether one was killed before its end."""
        with self._running() as running:
            port = free_port()
            for rank, name in enumerate(self.names):
                running.start(
                    name, self.round.seed, port, rank, len(self.names), self.folder, *place
                )
            return self._watch(running, kill)

    def _watch(self, running: Running, kill: Kill | None) -> bool:
        """Note events until all processes have ended, or one was killed."""
        left = set(running.processes)
        latest = dict.fromkeys(left, "its start")
        while left:
            work = running.seconds_of_work()
            try:
                name, event = running.events.get(timeout=self.patience)
            except queue.Empty:
                if running.seconds_of_work() - work > WORKS * self.patience:
                    continue  # it compiles, on a busy machine
                self.counts.hangs += 1
                running.dump()
                where = "; ".join(f"{name} is at {latest[name]}" for name in sorted(left))
                raise Failure(f"No progress for {self.patience:.0f} s: {where}.") from None
            if event is None:
                left.remove(name)
                status = running.processes[name].returncode
                if status:
                    self.counts.errors += 1
                    running.dump()
                    said = "".join(f"\n  {each}: {running.last_error(each)}" for each in latest)
                    raise Failure(f"{name} ended with {status} after {latest[name]}.{said}")
                continue
            latest[name] = _words(event)
            self._note(name, event)
            if kill is not None and _is_at(kill, self.names, name, event):
                if self._kill(running, name, kill):
                    return True
                kill = None  # it ended first
        return False

    def _note(self, name: str, event: dict[str, Any]) -> None:
        match event["event"]:
            case "step":
                self.counts.steps += name == self.names[0]
            case "not finite":
                self.problems.append(f"{name}: {event['name']} has values that are not finite.")
            case "done" | "again" as kind:
                for result, digests in event["hashes"].items():
                    by_process = self.hashes.setdefault((event["program"], result), {})
                    key = f"{name}{' from the beginning' if kind == 'again' else ''}"
                    before = by_process.setdefault(key, digests)
                    if before != digests:
                        self._differs(event["program"], result, f"{key} before and after a restart")

    def _kill(self, running: Running, name: str, kill: Kill) -> bool:
        """End a process, and then the others; return whether it was still running."""
        time.sleep(kill.delay)
        victim = running.processes[name]
        if victim.poll() is not None:
            return False
        victim.send_signal(signal.Signals[kill.signal])
        try:
            victim.wait(GRACE)
        except subprocess.TimeoutExpired:
            victim.kill()
            victim.wait()
        self.counts.kills += 1
        deadline = time.monotonic() + SURVIVAL
        while time.monotonic() < deadline and any(
            process.poll() is None for process in running.processes.values()
        ):
            time.sleep(0.05)
        return True

    def _newest(self) -> tuple[int, int]:
        """Return the program and step of the newest checkpoint that all processes have."""
        ranks: dict[tuple[int, int], set[int]] = {}
        for path in self.folder.glob("*.npz"):
            number, step, rank = map(int, path.stem.split("."))
            ranks.setdefault((number, step), set()).add(rank)
        whole = [place for place, found in ranks.items() if len(found) == len(self.names)]
        return max(whole, default=(0, 0))

    # ---------------------------------------------------------------------------------- compare

    def compare(self) -> None:
        """Compare the hashes of replicas, of a run from the beginning, and of the reference."""
        self.counts.programs += len(self.round.programs)
        for number, program in enumerate(self.round.programs):
            self.counts.collectives += len(program.collectives)
            results = [name for n, name in self.hashes if n == number]
            if len(results) < len(program.collectives):
                raise Failure(f"program {number} has no hashes of all of its results.")
            for result in results:
                self._compare_result(number, program, result)

    def _compare_result(self, number: int, program: Program, result: str) -> None:
        by_process = self.hashes[number, result]
        expected = by_process[REFERENCE]
        for suffix in ("", " from the beginning"):
            each = [by_process.get(f"{name}{suffix}") for name in self.names]
            if suffix and None in each:
                continue
            found = [digest for digests in each for digest in digests or []]
            self.counts.hashes += len(found)
            if result.startswith("result"):
                for group in replicas(program, int(result.split()[1]), self.round):
                    if len({found[worker] for worker in group}) > 1:
                        self._differs(number, result, f"replicas {group}{suffix}")
            if found != expected:
                self._differs(number, result, f"processes{suffix} and one process")

    def _differs(self, number: int, result: str, between: str) -> None:
        self.counts.differ += 1
        self.problems.append(f"program {number}, {result} differs between {between}.")


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


def _words(event: dict[str, Any]) -> str:
    """Return an event in words, such as "program 1, step 7"."""
    places = [f"{key} {event[key]}" for key in ("program", "step") if key in event]
    kinds = [] if event["event"] in ("program", "step") else [event["event"]]
    return ", ".join(places + kinds)


def _is_at(kill: Kill, names: list[str], name: str, event: dict[str, Any]) -> bool:
    place = event.get("program"), event.get("step")
    return name == names[kill.process] and place == (kill.program, kill.step)
