"""Metadata and versions of a release, and what runs with the base dependencies alone."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import dynamiq_jax as dq
from docs.scripts.release_notes import notes_of

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = [Requirement(text) for text in PROJECT["dependencies"]]
OPTIONAL = [Requirement(text) for extra in EXTRAS.values() for text in extra]
PACKAGES = ("dynamiq_jax", "pallas_kernels")
# The command line and its rooms, which need more than the base dependencies.
ON_TOP = {"_commands", "_console", "_measurement", "_prediction"}


def test_one_version_and_one_date_of_a_release():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, date = cited["version"], cited["date-released"]
    assert PROJECT["version"] == dq.__version__ == version
    assert f"\n## [{version}] - {date}\n" in CHANGELOG


def test_a_tag_has_its_part_of_the_changelog_which_takes_two_minutes_to_read():
    notes = notes_of(f"v{dq.__version__}")
    assert notes in CHANGELOG
    assert "## [" not in notes and notes.startswith("### ")
    assert 100 < len(re.sub(r"\]\([^)]*\)", "]", notes).split()) < 600
    with pytest.raises(ValueError, match=rf"tag v{re.escape(dq.__version__)}\.$"):
        notes_of("v0.0.1")


def test_requirements_are_valid_and_extras_name_extras_that_exist():
    assert {"bench", "cli", "cuda13", "docs", "examples", "test"} <= EXTRAS.keys()
    for requirement in (*REQUIRED, *OPTIONAL):
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= EXTRAS.keys(), requirement
        else:
            assert requirement.specifier, f"{requirement} has no lowest version"


def test_each_requirement_is_stated_once():
    """Extras include others. Only JAX is there again, with what GPUs need, from one version on."""
    others = [r for r in (*REQUIRED, *OPTIONAL) if r.name != PROJECT["name"]]
    stated = [(r.name, *sorted(r.extras)) for r in others]
    assert sorted(stated) == sorted(set(stated))
    assert len({(r.name, str(r.specifier)) for r in others}) == len({r.name for r in others})


def test_packages_are_typed_and_nothing_else_is_installed():
    assert tuple(PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == PACKAGES
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()


def test_the_source_distribution_has_every_file_of_the_repository():
    """And so all that the tests need. It names files and folders of the root."""
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name).exists()] == []
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"Git cannot read this checkout: {listed.stderr}")
    in_root = {name.split("/")[0] for name in listed.stdout.splitlines()}
    by_itself = {"README.md", "LICENSE", "pyproject.toml", ".gitignore"}
    assert in_root - by_itself == set(included)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_library_imports_its_dependencies_only(package):
    """Those of the base installation. The command line has an extra, and so have object stores,
    which one function imports when it is called. Shapes in annotations are those of a package of
    the tests, where it is there.
    """
    allowed = {*(r.name for r in REQUIRED), *PACKAGES, *sys.stdlib_module_names}
    for path in (ROOT / package).rglob("*.py"):
        if ON_TOP & {*path.parts}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            is_inside = getattr(node, "col_offset", 0) > 0
            optional = {"_transports.py": {"tenacity"}, "shapes.py": {"jaxtyping"}}
            extra = optional.get(path.name, set()) if is_inside else set()
            found = {name.split(".")[0] for name in names}
            assert found <= allowed | extra, f"{path}: {names}"


def test_everything_public_is_there_without_optional_packages():
    """In a process where importing one is an error."""
    optional = {r.name for r in OPTIONAL} - {PROJECT["name"], *(r.name for r in REQUIRED)}
    program = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(name.replace("-", "_") for name in optional)}))
import dynamiq_jax as dq
dq.methods.resolve_method("ef+mxfp4"), dq.topologies.Ring
print([getattr(dq, name).__name__.rpartition(".")[2] for name in dq.__all__] == dq.__all__)
"""
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown == "True\n"
