"""Rules for the source as a whole: who imports whom, what is private, how long, how quiet."""

import ast
import collections
import functools
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import dynamiq_jax as dq
from dynamiq_jax import islands, parts
from dynamiq_jax.islands import merging, messages
from dynamiq_jax.parts import collectives

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = ("dynamiq_jax", "pallas_kernels")

# Each layer may import itself and those before it.
LAYERS = (
    "pallas_kernels",
    "dynamiq_jax._core",
    "dynamiq_jax.topologies",
    "dynamiq_jax.methods",
    "dynamiq_jax._inputs",
    "dynamiq_jax._buckets",
    "dynamiq_jax._collectives",
    "dynamiq_jax._plan",
    "dynamiq_jax._states",
    "dynamiq_jax._check",
    "dynamiq_jax._run",
    "dynamiq_jax._rewriting",
    "dynamiq_jax._api",
    "dynamiq_jax.training",
    "dynamiq_jax.islands",
    "dynamiq_jax._inspection",
    "dynamiq_jax.reports",
    "dynamiq_jax.__init__",
    "dynamiq_jax.parts",
    "dynamiq_jax._console",
    "dynamiq_jax._measurement",
    "dynamiq_jax._prediction",
    "dynamiq_jax._commands",
    "dynamiq_jax.__main__",
)
# Private to the project, and the base of all its packages.
ROOM_OF_ALL = "pallas_kernels._jax"
# The command line and its rooms.
ON_TOP = LAYERS[LAYERS.index("dynamiq_jax.parts") + 1 :]
# Packages and modules with public names.
FACADES = (dq, dq.methods, dq.topologies, dq.training, dq.reports, islands, messages, parts)
# Those that follow the inside of the library.
INNER_FACADES = (merging, collectives)
# Functions with one keyword for each choice of a user.
COLLECTIVES = {
    "psum",
    "pmean",
    "psum_scatter",
    "all_gather",
    "all_reduce_gradients",
    "wire_report",
    "compress",
}


def module_name(path: pathlib.Path) -> str:
    """`a.b` for a/b.py and `a.__init__` for a/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def parsed(*folders: str) -> dict[str, ast.Module]:
    paths = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder == "tests" or "tests" not in path.parts  # those of benchmarks and examples
    ]
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


LIBRARY = parsed(*PACKAGES)


def inside(name: str, folder: str) -> bool:
    return f"{name}.".startswith(f"{folder}.")


def layer_of(name: str) -> str:
    return next(layer for layer in LAYERS if inside(name, layer))


def imports(tree: ast.Module) -> set[str]:
    """Modules of this project that a module imports anywhere, named like those of `LIBRARY`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            # `from a import b` imports a.b where that is a module or a package.
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                is_module = name in LIBRARY or f"{name}.__init__" in LIBRARY
                found.add(name if is_module else node.module)
    ours = {name for name in found if name.split(".")[0] in PACKAGES}
    return {name if name in LIBRARY else f"{name}.__init__" for name in ours}


def modules_of(tree: ast.Module) -> set[str]:
    """Modules that a module names in its imports, anywhere."""
    nodes = list(ast.walk(tree))
    found = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    return found | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@functools.cache
def edges() -> list[tuple[str, str]]:
    """(importing module, imported module) in the library."""
    return [(name, other) for name, tree in LIBRARY.items() for other in sorted(imports(tree))]


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef, ast.AST]]:
    """Every function, with the node that it is defined in."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, node


def test_the_rules_see_the_source():
    """Imports of every form are found, and every module has a layer."""
    assert len(LIBRARY) > 70
    assert {layer_of(name) for name in LIBRARY} == set(LAYERS)
    assert all(other in LIBRARY for _, other in edges())
    forms = "import pallas_kernels\nfrom dynamiq_jax import methods\n" + (
        "def f():\n    from dynamiq_jax._core.axis import Axis, jax\n    import jax.numpy"
    )
    assert imports(ast.parse(forms)) == {
        "pallas_kernels.__init__",
        "dynamiq_jax.methods.__init__",
        "dynamiq_jax._core.axis",
    }


def test_imports_go_one_way():
    """Each layer knows those before it, and nothing of the library knows the command line."""
    wrong = [
        (name, other)
        for name, other in edges()
        if LAYERS.index(layer_of(other)) > LAYERS.index(layer_of(name))
    ]
    assert wrong == []


def test_the_product_imports_nothing_of_the_research():
    """Neither do its tests, examples and benchmarks. `methods` knows the names of its methods."""
    found = {
        name
        for name, tree in parsed(*PACKAGES, "tests", "examples", "benchmarks").items()
        for module in modules_of(tree)
        if module.split(".")[0] in ("dynamiq_research", "research")
    }
    assert found == set()


def test_the_page_on_architecture_names_every_package_from_the_bottom_up():
    diagram, table = PAGE.split("## The path of one call")[0].split("| package | content |")
    rooms = [layer for layer in LAYERS if "__" not in layer]
    entries = re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)
    # Every module has its place in one of them.
    assert entries == [ROOM_OF_ALL, "pallas_kernels.codec", *rooms]
    drawn = re.findall(r"[\w.]+", diagram.split("```")[1])
    last_lines = [name.removeprefix("dynamiq_jax.") for name in reversed(entries)]
    assert [name for name in drawn if name in last_lines] == last_lines


def test_files_on_the_page_on_architecture_exist():
    named = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    paths = [f"/{name.replace('.', '/')}.py" for name in (*LIBRARY, *parsed("tests"))]
    assert named
    assert [name for name in named if not any(p.endswith(f"/{name}") for p in paths)] == []


def test_imports_make_no_cycle():
    """Neither modules nor packages: the parts of every package can be put into an order."""
    folders = {".".join(name.split(".")[:depth]) for name in LIBRARY for depth in range(4)}
    for folder in folders - set(LIBRARY):
        prefix = f"{folder}." if folder else ""
        names = [name for name in LIBRARY if name.startswith(prefix)]
        graph = {name.removeprefix(prefix).split(".")[0]: set[str]() for name in names}
        for edge in edges():
            if all(name.startswith(prefix) for name in edge):
                one, other = (name.removeprefix(prefix).split(".")[0] for name in edge)
                graph[one] |= {other} - {one}
        while graph:
            free = [part for part, needs in graph.items() if not needs & set(graph)]
            assert free, f"a cycle among {sorted(graph)} of {folder}"
            for part in free:
                del graph[part]


def private_parts(name: str) -> Iterator[tuple[str, str]]:
    """(private module or package, package that holds it) on the path of a name."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            yield ".".join(parts[: depth + 1]), ".".join(parts[:depth])


def test_what_is_private_is_imported_only_where_it_lives():
    """A name with an underscore is for the package that holds it, and the base for the project.
    The command line and its rooms belong to `dynamiq_jax` and may use all of that.
    The examples may use these rooms.
    """
    examples = [(n, o) for n, tree in parsed("examples").items() for o in imports(tree)]
    wrong = []
    for name, other in (*edges(), *examples):
        for private, holder in private_parts(other):
            if inside(name, "examples"):
                known = private in ON_TOP
            else:
                on_top = layer_of(name) in ON_TOP
                # `parts` shows what other packages hold.
                known = (on_top or inside(name, "dynamiq_jax.parts")) and inside(
                    holder, "dynamiq_jax"
                )
                known |= private == ROOM_OF_ALL
            if not (inside(name, holder) or known):
                wrong.append((name, private))
    assert wrong == []
    assert examples and not any(inside(other, "examples") for _, other in edges())


# What modules of the library may say to users.
SAYING = {
    "dynamiq_jax._check.exchange": "warnings",  # of a check that was not made, which is no error
    f"{ROOM_OF_ALL}.compat": "warnings",  # of a version of JAX in which processes are not compared
    "pallas_kernels.first_use": "warnings",  # of kernels that the base replaces
    "pallas_kernels.choice": "logging",  # of one line, which names the backend of a process
    "dynamiq_jax.islands._transports": "logging",  # of calls that fail, and of what is left out
    "dynamiq_jax._rewriting.compressed_step": "warnings",  # of a step that is compiled every time
}


def test_the_library_neither_prints_nor_logs():
    """Only the command line does, which has a console."""
    silent = {name: tree for name, tree in LIBRARY.items() if layer_of(name) not in ON_TOP}
    assert len(silent) > 60
    for module, tree in silent.items():
        nodes = list(ast.walk(tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        imported = {name.split(".")[0] for name in modules_of(tree)}
        assert not names & {"print", "breakpoint", "input"}, module
        if module in SAYING:
            imported.remove(SAYING[module])
        assert not imported & {"logging", "warnings", "rich", "tqdm", "tyro", "matplotlib"}, module
        assert not [a for a in attributes if a.startswith(("sys.std", "jax.debug."))], module


def test_files_are_short_and_say_what_they_hold():
    for module, tree in LIBRARY.items():
        lines = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text().splitlines()
        assert len(lines) <= 440, module
        assert ast.get_docstring(tree), module


def test_values_are_frozen():
    """Programs and plans are kept by their values, which nothing may change afterwards."""
    forms = {
        (module, node.name): ast.unparse(decorator)
        for module, tree in LIBRARY.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for decorator in node.decorator_list
        if "dataclass" in ast.unparse(decorator)
    }
    assert [name for name, form in forms.items() if "frozen=True" not in form] == []
    assert len(forms) > 100


def test_classes_have_names_of_their_own():
    """In the library, and in benchmarks those that other modules import.

    `Block` is one of each kernel backend, and `Config` the options of a benchmark.
    """
    modules = parsed("benchmarks")
    imported = {
        (node.module, alias.name)
        for tree in modules.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = collections.defaultdict(list)
    for module, tree in (LIBRARY | modules).items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    shared = {
        name: where
        for name, where in places.items()
        if name not in ("Block", "Config")
        and len(where) > 1
        and any(module in LIBRARY or (module, name) in imported for module in where)
    }
    assert shared == {}


def test_functions_take_at_most_six_parameters():
    wrong = []
    for module, tree in LIBRARY.items():
        for function, holder in functions(tree):
            given = function.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if isinstance(holder, ast.ClassDef) and names[:1] in (["self"], ["cls"]):
                names = names[1:]
            public = function.name in COLLECTIVES and any(
                inside(module, layer) for layer in ("dynamiq_jax._api", "dynamiq_jax.training")
            )
            if len(names) > 6 and not public:
                wrong.append(f"{module}.{function.name}: {names}")
    assert wrong == []


@pytest.mark.parametrize(
    "package",
    [package for package in (*FACADES, merging) if package is not parts],
    ids=lambda p: p.__name__,
)
def test_help_of_public_functions_describes_every_argument(package):
    """As an entry `name: text` under "Args:", with the name that the signature has.

    Names and types are the help of small parts: `check_flag(name, value)`.
    """
    functions = [getattr(package, name) for name in package.__all__]
    for function in filter(inspect.isfunction, functions):
        if function.__module__ == "typing":  # `parts.override`, in newer versions of Python
            continue
        text = inspect.getdoc(function) or ""
        section = re.search(r"^Args:\n((?: .*\n|\n)*)", f"{text}\n", re.M)
        described = re.findall(r"^  \*{0,2}(\w+): \S", section[1], re.M) if section else []
        assert described == [*inspect.signature(function).parameters], function.__name__


@pytest.mark.parametrize("package", (*FACADES, *INNER_FACADES), ids=lambda p: p.__name__)
def test_the_public_api_is_what_is_there(package):
    assert len(set(package.__all__)) == len(package.__all__)
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_main_api_is_small_and_documented():
    assert {*dq.__all__} >= COLLECTIVES
    assert len(dq.__all__) <= 24
    assert dq.__all__ == sorted(dq.__all__, key=lambda name: (not name.isupper(), name))
    assert all(getattr(dq, name).__doc__ for name in dq.__all__)
    assert sum(len(package.__all__) for package in FACADES) <= 100


def test_scripts_import_names_that_the_library_has():
    """Most scripts run on machines of their own, where a name that is gone would be found late."""
    for script, tree in parsed("benchmarks", "examples", "docs").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    has = hasattr(module, name) or find_spec(f"{node.module}.{name}")
                    assert has, f"{script}: {node.module}.{name}"
