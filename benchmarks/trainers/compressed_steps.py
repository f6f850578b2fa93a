"""Train steps of other packages, as they are and by `dq.compress`: losses and bytes.

    python -m benchmarks.trainers.compressed_steps

Runs in an environment of its own, see `compressed-steps-requirements.txt` beside this file. Workers
are virtual devices of this machine, and every run is a process of its own. The trainings are in
`steps_of_others.py`.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import dynamiq_jax as dq
from benchmarks import common
from benchmarks.trainers.steps_of_others import TRAININGS, Training, removed_functions

NUM_DEVICES = 2


def main() -> None:
    """Train with every package, write the result and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", default="dynamiq", help="compression (default: dynamiq)")
    parser.add_argument(
        "--runs",
        nargs="+",
        choices=TRAININGS,
        default=list(TRAININGS),
        help="what to train (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=common.RESULTS / "compressed_steps.json",
        help="result file (default: benchmarks/results/compressed_steps.json)",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a run of this process alone
    args = parser.parse_args()
    if args.one:
        name, method = args.one.split(",")
        args.out.write_text(json.dumps(train_here(TRAININGS[name], method)))
        return
    console = Console()
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Training", total=2 * len(args.runs))
        for name in args.runs:
            training = TRAININGS[name]
            row: dict[str, Any] = {"run": name, "title": training.title, "place": training.place}
            for kind, method in (("exact", ""), ("compressed", args.method)):
                progress.update(task, description=f"{training.title}, {kind}")
                row[kind] = train(name, method)
                progress.advance(task)
            results.append(row)
    packages = ("flax", "optax", *(TRAININGS[name].package for name in args.runs))
    config = {"method": args.method, "devices": NUM_DEVICES}
    config["versions"] = {package: metadata.version(package) for package in packages}
    path = common.write(args.out, config, results)
    console.print(as_table(results))
    console.print(f"Wrote {path}")


def train(name: str, method: str) -> dict[str, Any]:
    """Train in a process of its own, and return what it measured.

    Args:
      name: key of `TRAININGS`.
      method: compression method; empty for the step as it is.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        module = "benchmarks.trainers.compressed_steps"
        command = [sys.executable, "-m", module, "--one", f"{name},{method}", "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(
                f"The run {name} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
            )
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured


def train_here(training: Training, method: str) -> dict[str, Any]:
    """Train in this process, and describe the sums of the compressed step."""
    reports: list[Any] = []

    def wrap(step: Any, axis_name: str) -> Any:
        if not method:
            return step
        compressed = dq.compress(step, axis_name, method=method)

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not reports:
                reports.append(compressed.report(*args, **kwargs))
            return compressed(*args, **kwargs)

        return call

    with removed_functions():
        losses = training.train(wrap)
    return {"losses": losses} | (described(reports[0]) if reports else {})


def described(report: Any) -> dict[str, Any]:
    """Count the sums of a step, and the bytes of its groups in one call, before and after."""
    grouped = [each for each in report.sums if each.group is not None]
    return {
        "sums_compressed": len(report.compressed),
        "sums_exact": len(report.sums) - len(report.compressed),
        "groups": report.num_groups,
        "bytes_before": sum(each.bytes_before * (each.times or 1) for each in grouped),
        "bytes_after": sum(each.bytes_after * (each.times or 1) for each in grouped),
    }


def as_table(results: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each package."""
    table = Table(title="Train steps of others, exact and by dq.compress")
    table.add_column("package")
    for heading in (
        "first loss",
        "last, exact",
        "compressed",
        "sums",
        "bytes",
        "after",
        "of exact",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        exact, compressed = row["exact"], row["compressed"]
        before, after = compressed["bytes_before"], compressed["bytes_after"]
        table.add_row(
            row["title"],
            f"{exact['losses'][0]:.4f}",
            *(f"{kind['losses'][-1]:.4f}" for kind in (exact, compressed)),
            f"{compressed['sums_compressed']} + {compressed['sums_exact']} exact",
            f"{before:,.0f}",
            f"{after:,.0f}",
            f"1/{before / after:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
