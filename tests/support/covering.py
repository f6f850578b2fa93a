"""The test files that cover a module of the library, found by names and imports."""

import ast
import collections
import functools
from pathlib import Path

PACKAGES = ("dynamiq_jax", "pallas_kernels")
MOST = 8  # test files of a change


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def used(text: str) -> collections.Counter[str]:
    """Count uses of modules of the library, of names that come from them, and of members of any
    object, such as `.decode`.
    """
    names, modules = {"dq"}, collections.Counter[str]()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGES):
            names |= {alias.name for alias in node.names}
            modules.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    plain = (node.id for node in nodes if isinstance(node, ast.Name))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    members = [node.attr for node in attributes if getattr(node.value, "id", "") in names]
    members += [f".{node.attr}" for node in attributes]
    plain_names = collections.Counter(name for name in plain if name in names - {"dq"})
    return modules + plain_names + collections.Counter(members)


def definitions(text: str) -> dict[str, range]:
    """Return the functions and classes of a module with their lines, and the methods as `.name`."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, kinds):
            found[node.name] = range(node.lineno, node.end_lineno + 1)
            inner = [child for child in node.body if isinstance(child, kinds)]
            found |= {f".{n.name}": range(n.lineno, n.end_lineno + 1) for n in inner}
    return found


def direct(module: Path, library: dict[Path, str], tests: dict[Path, str]) -> list[Path]:
    """Return the test files with the name of a module or of its folder, in a folder of this name,
    and those that import it or what it defines. Those that use most of it come first.
    """
    defined = {name for name in definitions(library[module]) if not name.startswith(".")}
    stems = [stem.strip("_") for stem in dotted(module).split(".")[1:]]
    scores = {}
    for path, text in tests.items():
        same = sum(f"_{stem}_" in f"_{path.stem}_" for stem in stems)
        same += path.parent.name in stems
        scores[path] = 50 * same + sum(used(text)[name] for name in {*defined, dotted(module)})
    return sorted((path for path in tests if scores[path]), key=lambda path: -scores[path])


def covering_files(
    module: Path, line: int, library: dict[Path, str], tests: dict[Path, str]
) -> list[str]:
    """Return the test files that cover a line of a module: three of the module itself, and the
    first one of each module that uses the method, function or class around the line. Then those of
    the modules that use these, until they are enough.
    """
    around = [name for name, lines in definitions(library[module]).items() if line in lines]
    chosen = dict.fromkeys(direct(module, library, tests)[:3])
    # Users of the method first, which are fewer than those of its class.
    frontier, seen = [*reversed(around), dotted(module)], {module}
    while frontier and len(chosen) < MOST:
        users = dict.fromkeys(
            path
            for name in frontier
            for path, text in library.items()
            if path not in seen and name in used(text)
        )
        for user in users:
            chosen |= dict.fromkeys(direct(user, library, tests)[:1])
        seen |= set(users)
        frontier = [name for user in users for name in definitions(library[user])]
        frontier = [name for name in frontier if not name.startswith(".")]
    always = [path for path in tests if path.stem == "test_as_users_compile"]
    return [str(path) for path in dict.fromkeys([*[*chosen][:MOST], *always, module])]
