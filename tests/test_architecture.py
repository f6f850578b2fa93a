"""The rules of the house, on the source itself: who imports whom, how long, how quiet."""

import ast
import functools
import pathlib

import pytest

import dynamiq_jax as dq

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("dynamiq_jax", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What a folder may import of this project, beside itself. Longest prefix wins.
MAY_IMPORT = {
    "dynamiq_jax.codec": (),
    "pallas_kernels.compat": (),
    "dynamiq_jax.metrics": ("dynamiq_jax.codec",),
    "dynamiq_jax.checks": ("pallas_kernels.compat",),
    "dynamiq_jax._core.codec": (),
    "dynamiq_jax.topologies": ("dynamiq_jax._core.codec", "pallas_kernels.compat"),
    "dynamiq_jax.methods": (
        "dynamiq_jax._core.codec",
        "dynamiq_jax.codec",
        "pallas_kernels.compat",
        "dynamiq_jax.topologies._base",
        "pallas_kernels",
    ),
    "dynamiq_jax.axes": (
        "dynamiq_jax.checks",
        "pallas_kernels.codec.packing",
        "pallas_kernels.compat",
    ),
    "dynamiq_jax.buckets": (
        "dynamiq_jax.axes",
        "dynamiq_jax.checks",
        "dynamiq_jax._core.codec",
        "pallas_kernels.compat",
        "dynamiq_jax.methods",
        "dynamiq_jax.topologies",
    ),
    "pallas_kernels": ("dynamiq_jax.codec", "pallas_kernels.compat"),
}
COMMAND = (
    "dynamiq_jax._commands"  # on top of everything, with packages that the library does not need
)
LOWER = ("dynamiq_jax.codec", "dynamiq_jax.methods", "dynamiq_jax.topologies", "pallas_kernels")

every_file = pytest.mark.parametrize(
    "path", FILES, ids=lambda path: str(path.relative_to(ROOT)).removesuffix(".py")
)


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(node: ast.AST) -> set[str]:
    """Modules of this project that are imported anywhere below a node.

    `from a import b` counts as a.b where that is a module or a package, else as a.
    """
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            for alias in child.names:
                inner = ROOT / child.module.replace(".", "/") / alias.name
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                found.add(f"{child.module}.{alias.name}" if is_module else child.module)
        found |= imports(child)
    return {name for name in found if name.split(".")[0] in PACKAGES}


def inside(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + ".")


def test_there_is_something_to_look_at():
    names = {module_name(path) for path in FILES}
    assert len(names) == len(FILES) > 20
    assert all(any(inside(name, rule) for name in names) for rule in MAY_IMPORT)
    found = imports(tree_of(ROOT / "dynamiq_jax" / "methods" / "dynamiq_chunks.py"))
    assert {"pallas_kernels.codec.scales", "pallas_kernels.operations"} <= found


@every_file
def test_nothing_imports_what_is_above_it(path):
    name = module_name(path)
    rules = [folder for folder in MAY_IMPORT if inside(name, folder)]
    found = imports(tree_of(path))
    if rules:
        own = max(rules, key=len)
        allowed = (own, *MAY_IMPORT[own])
        assert [x for x in found if not any(inside(x, folder) for folder in allowed)] == []


@every_file
def test_no_lower_layer_knows_the_public_api(path):
    if any(inside(module_name(path), folder) for folder in LOWER):
        assert "dynamiq_jax" not in imports(tree_of(path))


@every_file
def test_the_library_does_not_need_the_command_line(path):
    if not inside(module_name(path), COMMAND):
        assert [name for name in imports(tree_of(path)) if inside(name, COMMAND)] == []


def test_imports_make_no_circle():
    graph = {module_name(path): imports(tree_of(path)) - {module_name(path)} for path in FILES}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name in graph if name not in done and graph[name] <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


@every_file
def test_the_library_is_silent(path):
    names = {node.id for node in ast.walk(tree_of(path)) if isinstance(node, ast.Name)}
    attributes = {
        ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)
    }
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in (node.names if isinstance(node, ast.Import) else [ast.alias(node.module)])
    }
    if inside(module_name(path), COMMAND):
        return
    assert not names & {"print", "breakpoint"}
    assert not imported & {"logging", "warnings", "rich", "tqdm", "tyro", "matplotlib"}
    assert not [a for a in attributes if a.startswith(("sys.std", "jax.debug"))]


@every_file
def test_a_file_is_one_idea(path):
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(tree_of(path)), "a file says what its idea is"


@every_file
def test_everything_public_says_what_it_is(path):
    definitions = (ast.FunctionDef, ast.ClassDef)
    public = [
        node
        for node in tree_of(path).body
        if isinstance(node, definitions) and not node.name.startswith("_")
    ]
    members = [
        member
        for node in public
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
    ]
    assert [node.name for node in (*public, *members) if not ast.get_docstring(node)] == []


def test_the_public_api_is_small_and_real():
    assert len(dq.__all__) <= 13
    assert dq.__all__ == sorted(dq.__all__, key=lambda name: (not name.isupper(), name))
    assert all(getattr(dq, name).__doc__ for name in dq.__all__)
