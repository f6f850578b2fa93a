"""Workflows, hooks and the Makefile run the same commands, on the versions of pyproject.toml."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

# Of the nearest folder above that has it: tests may move into folders.
ROOT = next(path for path in Path(__file__).parents if (path / "pyproject.toml").is_file())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}
MORE = WORKFLOWS["tests"]["jobs"]["more"]["strategy"]["matrix"]["target"]


def recipe(target: str) -> list[str]:
    """Return the commands of a target, with `RUN` as in the default environment."""
    rule = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.MULTILINE)
    commands = [line.strip() for line in rule[1].splitlines()]
    return [command.replace("$(RUN)", ".venv/bin/python") for command in commands]


def commands(workflow: str) -> list[str]:
    steps = [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]
    return [step["run"] for step in steps if "run" in step]


def test_hooks_run_what_make_lint_runs():
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert [hook["entry"] for hook in hooks] == recipe("lint")
    # Versions are those of the environment, and a hook sees all files: as `make lint` does.
    assert {repository["repo"] for repository in repositories} == {"local"}
    assert all(h["language"] == "system" and not h["pass_filenames"] for h in hooks)


def test_the_matrix_has_the_pythons_and_the_oldest_jax_of_the_project():
    pattern = r"Programming Language :: Python :: (\d\.\d+)"
    found = [re.fullmatch(pattern, text) for text in PROJECT["classifiers"]]
    pythons = [match[1] for match in found if match]
    matrix = WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    (oldest,) = matrix["include"]
    assert oldest["python"] == pythons[0]
    lowest = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    for name in ("jax", "jaxlib"):
        (bound,) = lowest[name]
        assert bound.operator == ">="
        assert Version(bound.version) == Version(oldest["jax"])


def test_workflows_run_targets_that_exist():
    for workflow in WORKFLOWS:
        for command in commands(workflow):
            tool, target = shlex.split(command, comments=True)[:2]
            assert tool == "make"
            targets = MORE if "matrix.target" in command else [target]
            assert all(re.search(rf"^{t}:.*##", MAKEFILE, flags=re.MULTILINE) for t in targets)
    run = {*MORE, *(word for w in WORKFLOWS for c in commands(w) for word in shlex.split(c))}
    tests = {f"test-{name}" for name in ("fast", "slow", "x64", "research", "oracles")}
    assert {"lint", "lint-docs", *tests} <= run


def test_make_installs_the_version_of_jax_that_it_is_given():
    command = ["make", "--dry-run", "--always-make", "test-fast", f"PYTHON={sys.executable}"]
    newest, oldest = (
        subprocess.run(
            [*command, f"JAX={jax}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for jax in ("", "0.10.0")
    )
    assert "jax==0.10.0 jaxlib==0.10.0" in oldest
    assert "jax==" not in newest
