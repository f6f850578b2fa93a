"""Change the library in random places, and report the changes that no test notices.

    python -m tests.mutants                    draw 100 changes of cosmic-ray
    python -m tests.mutants --sample 8 --only methods/_mx
    python -m tests.mutants --without contrib  draw changes of the product alone
    python -m tests.mutants --seed 1           draw others

Each change is applied to a copy of the last commit, where the tests of its module run, without
those marked slow: `tests/support/covering.py` finds them. A change takes up to some minutes.
`cosmic-ray.toml` describes the changes, and `pip install '.[dev]'` installs cosmic-ray.
"""

import argparse
import ast
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
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome, WorkerOutcome
from rich.console import Console
from rich.progress import track

from tests.support.covering import PACKAGES, covering_files

ROOT = Path(__file__).parents[1]
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


def command(files: list[str]) -> str:
    given = CONFIG.test_command.removeprefix("python ")
    return shlex.join([sys.executable, *shlex.split(given), *files])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", type=int, default=100, help="number of changes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the path of the modules to change")
    parser.add_argument("--without", help="part of the path of modules to leave alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", folder, "HEAD"], check=True)
        try:
            os.chdir(folder)
            os.environ["PYTHONPATH"] = folder
            return report(options)
        finally:
            os.chdir(ROOT)
            subprocess.run([*git, "remove", "--force", folder], check=True)


def report(options: argparse.Namespace) -> int:
    """Try the changes in the current folder, a copy, and print those that survive."""
    console = Console(soft_wrap=True)
    found = find_modules(map(Path, PACKAGES))
    every = sorted(filter_paths(found, CONFIG["excluded-modules"]))
    library = {path: path.read_text() for path in every}
    tests = {path: path.read_text() for path in sorted(Path("tests").rglob("test_*.py"))}
    modules = [path for path in every if options.only in path.as_posix()]
    if options.without:
        modules = [path for path in modules if options.without not in path.as_posix()]
    with console.status(f"looking for places in {len(modules)} modules"):
        changes = drawn(modules, options.sample, options.seed)
    files = [covering_files(c.module_path, c.start_pos[0], library, tests) for c in changes]
    with console.status("running the tests without a change"):
        unchanged = sorted({file for of_change in files for file in of_change})
        outcome, output = run_tests(command(unchanged), 60 * CONFIG.timeout)
    if outcome != TestOutcome.SURVIVED:
        console.print(f"The tests fail without a change.\n{output}", markup=False)
        return 2
    survivors = 0
    both = list(zip(changes, files, strict=True))
    for change, covering in track(both, "changes", console=console):
        result = mutate_and_test([change], command(covering), CONFIG.timeout)
        if result.worker_outcome != WorkerOutcome.NORMAL:
            raise RuntimeError(f"{change} was not tried: {result.output}")
        if result.test_outcome == TestOutcome.SURVIVED:
            lines = [s for s in result.diff.splitlines() if re.match(r"[-+](?![-+])", s)]
            where = f"{change.module_path}:{change.start_pos[0]}"
            parts = f"not noticed: {where}", *lines, f"tests: {' '.join(covering)}"
            console.print("\n".join(parts), markup=False)
            survivors += 1
    noticed = len(changes) - survivors
    console.print(f"{noticed} of {len(changes)} noticed ({noticed / max(1, len(changes)):.0%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
