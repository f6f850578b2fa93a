"""Apply deliberate faults one by one; see `tests.faults`."""

import argparse
import importlib
import json
import os
import pkgutil
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import tests.faults
from tests.faults import Fault

ROOT = Path(__file__).parents[2]
COPIED = ("benchmarks", "docs", "dynamiq_jax", "examples", "pallas_kernels", "tests")
FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider")
TIMEOUT = 900  # seconds: a fault that hangs the tests is noticed too


def all_faults() -> Iterator[Fault]:
    """Yield the faults of all files beside this one."""
    for module in pkgutil.iter_modules(tests.faults.__path__):
        if not module.name.startswith("__"):
            yield from importlib.import_module(f"tests.faults.{module.name}").FAULTS


def outcome(fault: Fault, checkout: Path) -> str:
    """Apply a fault, run its tests, and return what came of it."""
    path = checkout / fault.file
    original = path.read_text()
    if original.count(fault.old) != 1:
        return f"stale: its text is {original.count(fault.old)} times in the file"
    if fault.equivalent:
        return "equivalent"
    path.write_text(original.replace(fault.old, fault.new))
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*PYTEST, *fault.tests],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "noticed (time-out)"
    finally:
        path.write_text(original)
    if run.returncode == 0:
        return "not noticed"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "noticed" if failed else f"no tests ran: {run.stdout[-200:]}{run.stderr[-200:]}"


def copy_checkout(folder: Path) -> Path:
    """Copy what the tests need to a folder, and return it."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=tests.faults.__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a word in the name or file of a fault")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args()
    faults = [f for f in all_faults() if options.only in f"{f.name} {f.file}"]
    console, rows = Console(), []
    checkouts: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def row(fault: Fault) -> dict[str, str | float]:
        checkout = checkouts.get()
        start = time.perf_counter()
        result = outcome(fault, checkout)
        checkouts.put(checkout)
        seconds = round(time.perf_counter() - start, 1)
        return {"file": fault.file, "fault": fault.name, "outcome": result, "s": seconds}

    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        for job in range(options.jobs):
            checkouts.put(copy_checkout(Path(folder) / str(job)))
        results = pool.map(row, faults)
        for done in track(results, "faults", len(faults), console=console, transient=True):
            rows.append(done)
            if not done["outcome"].startswith(("noticed", "equivalent")):
                console.print(f"{done['file']}: {done['fault']}: {done['outcome']}", soft_wrap=True)
    table = Table(*rows[0]) if rows else Table()
    for done in rows:
        table.add_row(*map(str, done.values()))
    console.print(table)
    counted = [done for done in rows if done["outcome"] != "equivalent"]
    noticed = sum(done["outcome"].startswith("noticed") for done in counted)
    console.print(f"{noticed} of {len(counted)} noticed, {len(rows) - len(counted)} equivalent")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(noticed < len(counted))


if __name__ == "__main__":
    raise SystemExit(main())
