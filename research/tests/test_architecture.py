"""The house of research: it takes public names alone, and has the habits of the product."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

import dynamiq_research
from dynamiq_research import LEVELS
from tests.project import test_architecture as house
from tests.project.test_architecture import ROOT, inside, private_parts

PACKAGE = "research.dynamiq_research"
LIBRARY = house.parsed("research/dynamiq_research")
COMMAND = re.compile(r"research\.dynamiq_research\.\w+\.(command|__main__)")
CONSOLE = "dynamiq_jax._console"


HOUSES = (*house.PACKAGES, "dynamiq_research")


def imports(tree: ast.Module, packages: Sequence[str] = HOUSES) -> set[str]:
    """Modules and packages, of both houses unless others are given, that a module imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in packages}


def edges() -> list[tuple[str, str]]:
    return [(name, other) for name, tree in LIBRARY.items() for other in sorted(imports(tree))]


def system(name: str) -> str:
    """Return the system that a module belongs to."""
    return name.partition("dynamiq_research.")[2].split(".")[0]


def test_public_names_are_enough():
    """So anybody could write such a system in a package of their own. A command has the console."""
    assert len(edges()) > 100
    private = [
        (name, other)
        for name, other in edges()
        if list(private_parts(other)) and not other.startswith("dynamiq_research")
    ]
    assert all(COMMAND.fullmatch(name) and inside(other, CONSOLE) for name, other in private)
    assert private


def test_systems_take_each_other_from_their_packages():
    for name, other in edges():
        is_inner = other.startswith("dynamiq_research") and not name.endswith(f"{PACKAGE}.__init__")
        if is_inner and system(name) != system(other):
            assert other.rpartition(".")[0].count(".") <= 1, (name, other)


def test_every_system_has_a_level_of_trust():
    assert {*LEVELS} == {system(name) for name in LIBRARY} - {"__init__"}


def test_every_public_name_is_there_once():
    names = dynamiq_research.__all__
    assert len({*names}) == len(names)
    assert all(getattr(dynamiq_research, name).__doc__ for name in names)


def test_files_are_short_and_say_what_they_hold():
    for module, tree in LIBRARY.items():
        lines = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text().splitlines()
        assert len(lines) <= 440, module
        assert ast.get_docstring(tree), module


def test_classes_have_names_of_their_own():
    """In both houses."""
    names = [
        node.name
        for tree in (*LIBRARY.values(), *house.LIBRARY.values())
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "Block"
    ]
    assert len(names) == len({*names})


@pytest.mark.parametrize("folder", ("research/benchmarks", "research/examples", "research/tests"))
def test_scripts_import_names_that_are_there(folder):
    """Most scripts run on machines of their own, where a name that is gone would be found late."""
    for tree in house.parsed(folder).values():
        for name in imports(tree, (*HOUSES, "benchmarks", "research", "tests")):
            module, _, attribute = name.rpartition(".")
            if not module:
                continue
            found = importlib.import_module(module)
            assert hasattr(found, attribute) or importlib.util.find_spec(name), name


def test_a_command_says_by_itself_which_packages_it_lacks():
    """So it imports none of them."""
    code = (
        "import sys, dynamiq_research.drop_compute.__main__\n"
        "assert not {'tyro', 'rich', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
