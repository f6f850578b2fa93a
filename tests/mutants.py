"""Change the library in random places, and report the changes that no test notices.

    python -m tests.mutants                    draw 100 changes of cosmic-ray
    python -m tests.mutants --sample 8 --only methods/_mx
    python -m tests.mutants --seed 1           draw others

Each change is applied to a copy of the last commit, where the tests that reach its line run,
without those marked slow. Which ones these are is measured with coverage, in about 15 minutes,
once for a version of the library and its tests. A change takes up to some minutes.
`cosmic-ray.toml` describes the changes, and `pip install '.[dev]'` installs what is needed.
"""

import argparse
import ast
import collections
import hashlib
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.config import load_config
from cosmic_ray.modules import filter_paths, find_modules
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome
from coverage import CoverageData
from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[1]
PACKAGES = ("dynamiq_jax", "pallas_kernels")
NATIVE_BUILD = "pallas_kernels/_native/build.py"
RESULTS = ROOT / "results" / "mutants"
CONFIG = load_config(str(ROOT / "cosmic-ray.toml"))
# Decorators without an effect on results, and an argument of `zip` without one on a right program.
NO_EFFECT = (
    *("cache", "functools.cache", "functools.lru_cache"),
    *("abstractmethod", "abc.abstractmethod", "override", "compat.override"),
)
ONLY_A_CHECK = "strict"


def without_meaning(path: Path) -> Iterator[range]:
    """Yield the lines and columns of annotations, decorators and arguments whose changes mean
    nothing, as ranges of `place`.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        skipped = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.keyword) and node.arg == ONLY_A_CHECK:
            skipped.append(node.value)
        decorators = getattr(node, "decorator_list", ())
        skipped += [d for d in decorators if ast.unparse(d).partition("(")[0] in NO_EFFECT]
        for part in filter(None, skipped):
            start = place(part.lineno, part.col_offset - (part in decorators))  # with the @
            yield range(start, place(part.end_lineno, part.end_col_offset))


def place(line: int, column: int) -> int:
    return 1000 * line + column


def drawn(modules: list[Path], number: int, seed: int) -> list[MutationSpec]:
    """Draw places that have a meaning, and one change of each: some operators have a dozen."""
    excluded = re.compile("|".join(CONFIG.sub("filters", "operators-filter")["exclude-operators"]))
    with (
        tempfile.TemporaryDirectory() as folder,
        use_db(Path(folder) / "session.sqlite") as session,
    ):
        init(modules, session, CONFIG.operators_config)
        found = [item.mutations[0] for item in session.work_items]
    skipped = {path: list(without_meaning(path)) for path in modules}
    places: dict[tuple[Path, int], list[MutationSpec]] = {}
    for change in sorted(found, key=lambda c: (c.module_path, c.operator_name, c.occurrence)):
        where = place(*change.start_pos)
        meant = not any(where in part for part in skipped[change.module_path])
        if meant and not excluded.match(change.operator_name):
            places.setdefault((change.module_path, where), []).append(change)
    choice = random.Random(seed)
    chosen = choice.sample(sorted(places), min(number, len(places)))
    return [choice.choice(places[key]) for key in sorted(chosen)]


def version_of_sources() -> str:
    """Return a digest of the library and its tests, which commits of pages alone do not change."""
    tree = subprocess.check_output(["git", "ls-tree", "HEAD", *PACKAGES, "tests", "pyproject.toml"])
    return hashlib.sha256(tree).hexdigest()[:16]


def measured(version: str) -> CoverageData:
    """Return which tests reach which line, after running them all where that is not known yet.

    Raises:
      RuntimeError: a test fails without a change.
    """
    path = RESULTS / f"{version}.coverage"
    if not path.exists():
        RESULTS.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(".partial")
        environment = {**os.environ, "COVERAGE_FILE": str(made)}
        lines = ["--cov", "--cov-context=test", "--cov-report="]
        run = command(["tests", *PACKAGES, "-m", "not slow", "--dist=loadfile", *lines])
        done = subprocess.run(
            shlex.split(run), env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"The tests fail without a change.\n{done.stdout}{done.stderr}")
        made.rename(path)
    data = CoverageData(str(path))
    data.read()
    return data


def tests_of(change: MutationSpec, data: CoverageData) -> list[str]:
    """Return the tests that reach the line of a change. Those of files that are about it come
    first: most tests of these files reach it.
    """
    of_lines = data.contexts_by_lineno(str(change.module_path))
    # A statement of several lines is known by the first of them that computes anything.
    before = [line for line in of_lines if line <= change.start_pos[0]]
    reaching = {each for each in of_lines[max(before)] if each} if before else set()
    if not reaching:  # runs when the module is imported
        reaching = {each for contexts in of_lines.values() for each in contexts if each}
    tests = {each.rpartition("|")[0] for each in reaching}
    every = {each.rpartition("|")[0] for each in data.measured_contexts()}
    number, of_all = (
        collections.Counter(each.partition("::")[0] for each in some) for some in (tests, every)
    )

    def order(test: str) -> tuple[float, str]:
        file = test.partition("::")[0]
        return -number[file] / of_all[file], test

    return sorted(tests, key=order)


def command(arguments: list[str]) -> str:
    given = CONFIG.test_command.removeprefix("python ")
    return shlex.join([sys.executable, *shlex.split(given), *arguments])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="number of changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the path of the modules to change")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, "HEAD"], check=True)
        try:
            os.chdir(folder)
            os.environ["PYTHONPATH"] = folder
            subprocess.run([sys.executable, NATIVE_BUILD], check=True)
            return report(options)
        finally:
            os.chdir(ROOT)
            subprocess.run([*git, "remove", "--force", folder], check=True)


def report(options: argparse.Namespace) -> int:
    """Try the changes in the current folder, a copy, and print those that survive."""
    console = Console(soft_wrap=True)
    found = find_modules(map(Path, PACKAGES))
    every = sorted(filter_paths(found, CONFIG["excluded-modules"]))
    modules = [path for path in every if options.only in path.as_posix()]
    with console.status(f"looking for places in {len(modules)} modules"):
        changes = drawn(modules, options.sample, options.seed)
    with console.status("finding the tests that reach each line"):
        data = measured(version_of_sources())
    survivors = 0
    chosen = Path("tests_of_change.txt")
    for change in track(changes, "changes", console=console):
        tests = tests_of(change, data)
        chosen.write_text("\n".join(tests))
        result = mutate_and_test([change], command([f"@{chosen}"]), CONFIG.timeout)
        if result.worker_outcome != WorkerOutcome.NORMAL:
            raise RuntimeError(f"{change} was not tried: {result.output}")
        if result.test_outcome == TestOutcome.SURVIVED:
            lines = [s for s in result.diff.splitlines() if re.match(r"[-+](?![-+])", s)]
            where = f"{change.module_path}:{change.start_pos[0]}"
            parts = f"not noticed: {where}", *lines, f"{len(tests)} tests reach it"
            console.print("\n".join(parts), markup=False)
            survivors += 1
    noticed = len(changes) - survivors
    console.print(f"{noticed} of {len(changes)} noticed ({noticed / max(1, len(changes)):.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
