"""All measurements behind the tables of CPUs, one after the other.

    python -m benchmarks.cpu_tables          all that are missing: 2 hours on a quiet machine
    python -m benchmarks.cpu_tables --tiny   each for a moment, without files

A run that was stopped goes on where it was. A measurement counts as done when its marker is in
FOLDER; `--again` starts anew. Each writes its file of benchmarks/results, with the cores, the
threads of XLA, the codec and whether memory was kept. Emulated hosts divide the cores: their
threads are in the rows. At the end, all tables and figures of the pages are written.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.command import Report, benchmark, run

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
_LOW_BITS = (
    *("psum", "bf16:ring", "dynamiq:3:ring", "dynamiq:4:ring", "ef+powersgd:ring"),
    *("ef+topk_chunked:2:ring", "ef+arc_top_k:2:ring", "ef+split_sketch:2:decay=0.5:ring"),
    *("ef+marsit:ring", "gc+marsit:ring", "ef21m+arc_top_k:4:inner=exact:ring"),
)
_LOCAL = (
    *("psum", "bf16:ring", "dynamiq:5:ring", "dynamiq:4:ring", "dynamiq:4:ring@20"),
    "dynamiq:4:ring@20x2",
)
_ENTROPY = (
    *("bf16:ring", "thc:ring", "thc:all_to_all", "entropy_coded:all_to_all"),
    "entropy_coded:agreement=0.5:coder=patched:all_to_all",
    *("entropy_coded:ring", "dynamiq:5:ring", "dynamiq:5:all_to_all"),
)
_FEW_STEPS = (
    *("--settings", "psum", "dynamiq:5:ring", "--rates", "1gbit", "--seeds", "0", "--steps", "3"),
    *("--pretrain-steps", "3", "--width", "64", "--layers", "1"),
)


@dataclasses.dataclass(frozen=True)
class TableSource:
    """One measurement."""

    name: str  # of its file in benchmarks/results
    module: str
    minutes: int  # on two cores
    options: Sequence[str] = ()
    tiny: Sequence[str] = ()  # that make it short, in place of `options`
    file_option: str = ""  # that names its file; "" for one that `--no-save` prevents
    needs: str = ""  # a folder that another target makes

    def command(self, *, tiny: Path | None) -> list[str]:
        """Return the command line.

        Args:
          tiny: folder for the file of a short run; None for the whole measurement.
        """
        options = list(self.options if tiny is None else self.tiny)
        if self.file_option:
            folder = RESULTS if tiny is None else str(tiny)
            options += [self.file_option, f"{folder}/{self.name}.json"]
        elif tiny is not None:
            options.append("--no-save")
        return [sys.executable, "-m", f"benchmarks.{self.module}", *options]


_TRAINING = "training.time_to_accuracy"
STEPS = (
    TableSource("native", "speed.native", 2, tiny=("--size", "1048576", "--repeats", "2")),
    TableSource(
        "codec", "speed.codec", 4, tiny=("--sizes", "1048576", "--bits", "5", "--repeats", "2")
    ),
    TableSource(
        "memory",
        "speed.memory",
        8,
        tiny=("--size", "1048576", "--workers", "2", "--settings", "psum", "dynamiq:5:ring"),
    ),
    TableSource(
        "cost_model",
        "speed.cost_model",
        10,
        tiny=(
            *("--hosts", "2", "4", "--rates", "200mbit", "1gbit", "--size", "1Mi"),
            *("--repeats", "1", "--settings", "psum", "bf16:ring", "dynamiq:5:ring"),
            *("--tolerance", "10"),
        ),
    ),
    TableSource("time_to_accuracy", _TRAINING, 30, (), _FEW_STEPS, "--output"),
    TableSource(
        "time_to_accuracy_low_bits",
        _TRAINING,
        15,
        ("--rates", "100mbit", "--settings", *_LOW_BITS),
        _FEW_STEPS,
        "--output",
    ),
    TableSource(
        "time_to_accuracy_local_sgd",
        _TRAINING,
        10,
        ("--rates", "10mbit", "100mbit", "--width", "128", "--settings", *_LOCAL),
        _FEW_STEPS,
        "--output",
    ),
    TableSource(
        "real_lm_time_to_accuracy",
        "real_lm.time_to_accuracy",
        15,
        tiny=("--rates", "10gbit", "--size", "1Mi", "--repeats", "1"),
        needs="results/smollm2",
    ),
    TableSource(
        "islands_links",
        "islands.links",
        10,
        tiny=(
            *("--rates", "100mbit", "--steps", "20", "--every", "5", "--width", "64"),
            *("--pretrain-steps", "3", "--repeats", "1"),
        ),
    ),
    TableSource(
        "entropy_network",
        "emulation",
        3,
        (
            *("--hosts", "8", "--rate", "100mbit", "1gbit", "--size", "4Mi", "--repeats", "3"),
            *("--settings", *_ENTROPY),
        ),
        (
            *("--hosts", "2", "--rate", "1gbit", "--size", "1Mi", "--repeats", "1"),
            *("--settings", "bf16:ring", "dynamiq:5:ring"),
        ),
        "--json",
    ),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options."""

    only: tuple[str, ...] = ()
    """Names of files in benchmarks/results; all if empty."""

    tiny: bool = False
    """Run each for a moment, to see that it runs. No file is written."""

    again: bool = False
    """Also measure what is done."""

    load: float = 0.5
    """Largest load average of a minute, before a measurement, with which it starts."""

    folder: Path = Path("results/cpu_tables")
    """Folder of the markers and of what each measurement writes to the terminal."""


@benchmark("cpu_tables")
def main(config: Config) -> Report:
    """Run all measurements that are missing."""
    unknown = set(config.only) - {step.name for step in STEPS}
    if unknown:
        names = ", ".join(step.name for step in STEPS)
        sys.exit(f"--only: {', '.join(sorted(unknown))} is not there. Give some of {names}.")
    config.folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if step.name in config.only or not config.only]
    if not (config.again or config.tiny):
        steps = [step for step in steps if not _marker(config, step).exists()]
    left, failed = sum(step.minutes for step in steps), []
    for number, step in enumerate(steps, 1):
        about = "a moment" if config.tiny else f"{step.minutes} minutes, of {left} that are left"
        print(f"[{number}/{len(steps)}] {step.name}: {about}", flush=True)
        left -= step.minutes
        if step.needs and not (ROOT / step.needs).exists():
            print(f"   left out: {step.needs} is missing, which `make demo-llm` makes", flush=True)
            continue
        if not config.tiny:
            _wait_until_quiet(config.load)
        begin = time.monotonic()
        if _measured(step, config):
            print(f"   done in {time.monotonic() - begin:.0f} s", flush=True)
        else:
            failed.append(step.name)
            print(f"   failed: see {_log(config, step)}", flush=True)
    if not config.tiny and not failed:
        for script in ("tables", "figures"):
            subprocess.run([sys.executable, "-m", f"docs.scripts.{script}"], check=True, cwd=ROOT)
    return Report(status=1 if failed else 0)


def _measured(step: TableSource, config: Config) -> bool:
    """Run a measurement, and return whether it ended well."""
    with tempfile.TemporaryDirectory() as folder, _log(config, step).open("w") as log:
        command = step.command(tiny=Path(folder) if config.tiny else None)
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0 and not config.tiny:
        _marker(config, step).touch()
    return done.returncode == 0


def _wait_until_quiet(most: float) -> None:
    """Wait until this machine does little else, as times of a busy one mean nothing."""
    while (load := os.getloadavg()[0]) > most:
        print(f"   waiting: the load average is {load:.2f}, above --load {most:g}", flush=True)
        time.sleep(20)


def _marker(config: Config, step: TableSource) -> Path:
    return config.folder / f"{step.name}.done"


def _log(config: Config, step: TableSource) -> Path:
    return config.folder / f"{step.name}.log"


if __name__ == "__main__":
    run(main, __doc__)
