"""The test files that cover a module of the library, found by names and imports."""

import ast
import collections
import functools
from pathlib import Path

PACKAGES = ("dynamiq_jax", "pallas_kernels")
FEWEST, MOST = 2, 5  # test files of a module


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def used(text: str) -> collections.Counter[str]:
    """Count uses of modules of the library, and of names that come from them."""
    names, modules = {"dq"}, collections.Counter[str]()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGES):
            names |= {alias.name for alias in node.names}
            modules.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    plain = (node.id for node in nodes if isinstance(node, ast.Name))
    members = (
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in names
    )
    plain_names = collections.Counter(name for name in plain if name in names - {"dq"})
    return modules + plain_names + collections.Counter(members)


def tests_of(module: Path, library: dict[str, str], tests: dict[Path, str]) -> list[str]:
    """Return the test files of a module: those that have its name, or import it or what it
    defines, those that use most of it first. If they are few, also those of its importers.
    """
    scores: dict[Path, float] = dict.fromkeys(tests, 0)
    frontier, seen, weight = {dotted(module)}, set[str](), 1.0
    while frontier and sum(score > 0 for score in scores.values()) < FEWEST:
        for name in frontier:
            stem = name.rpartition(".")[2].strip("_")
            body = ast.parse(library[name]).body
            defined = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
            for path, text in tests.items():
                same = f"_{stem}_" in f"_{path.stem}_"
                uses = sum(count for use, count in used(text).items() if use in {*defined, name})
                scores[path] += weight * (50 * same + min(50, uses))
        seen |= frontier
        frontier = {n for n, text in library.items() if frontier & used(text).keys()} - seen
        weight /= 100
    best = sorted((p for p in tests if scores[p] > 0), key=lambda p: (-scores[p], p))[:MOST]
    always = [path for path in tests if path.stem == "test_as_users_compile"]
    return [str(path) for path in dict.fromkeys([*best, *always, module])]  # with its doctests
