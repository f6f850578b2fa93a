"""What README and the documentation show runs as it stands, links to what there is, and has the
figures of the result files.
"""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import dynamiq_jax as dq
from dynamiq_jax import cli
from dynamiq_jax.methods import METHODS, ErrorFeedback
from dynamiq_jax.topologies import TOPOLOGIES

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
COMMANDS = ("bench", "network", "advise", "compare")
EXAMPLE = ROOT / "examples" / "finetune_llm.py"
slow = pytest.mark.slow


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def shell_lines() -> list[tuple[str, list[str]]]:
    """Every command that a page shows, as words, without variables set in front of it."""
    lines = []
    for page, text in PAGES.items():
        for block in code_blocks(text, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    lines.append((page, words))
    return lines


# ----------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize(
    "page",
    [
        # Whole training steps, and a kernel that is interpreted.
        pytest.param(page, marks=slow if "recipes/" in page or "CONTRIBUTING" in page else ())
        for page in PAGES
        if code_blocks(PAGES[page], "python")
    ],
)
def test_python_of_a_page_runs_in_order_and_prints_what_it_says(page):
    """In one namespace, on eight devices. A comment behind `print` is what it prints."""
    blocks = code_blocks(PAGES[page], "python")
    namespace: dict = {}
    printed = io.StringIO()
    # The suite is stricter than JAX is for its users.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", "\n".join(blocks), flags=re.MULTILINE)
    assert [line.strip() for line in printed.getvalue().splitlines()] == expected


def test_diff_names_a_public_function():
    for page in ("README.md", "docs/index.md"):
        (block,) = code_blocks(PAGES[page], "diff")
        (added,) = re.findall(r"^\+ grads = dq\.(\w+)", block, flags=re.MULTILINE)
        assert added in dq.__all__


# --------------------------------------------------------------------------------------- commands


def test_pages_show_commands_of_every_kind():
    first = {words[0] for _, words in shell_lines()}
    assert first == {"make", "pip", "python", "dynamiq-jax"}, "a new kind: check it below"
    made = {words[1] for _, words in shell_lines() if words[0] == "make"}
    assert {"demo", "test"} <= made
    ran = {words[1] for _, words in shell_lines() if words[0] == "dynamiq-jax"}
    assert ran == set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=f"{page}: {' '.join(words)}")
        for page, words in shell_lines()
        if words[0] == "dynamiq-jax"
    ],
)
def test_options_of_the_command_line_exist(words, monkeypatch):
    started = []
    for name in COMMANDS:
        command = getattr(
            importlib.import_module(f"dynamiq_jax._commands.{name}"), name.capitalize()
        )
        monkeypatch.setattr(command, "run", lambda self: started.append(self) or 0)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert [type(command).__name__.lower() for command in started] == [words[1]]


def test_files_targets_and_extras_of_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page, words in shell_lines():
        shown = f"{page}: {shlex.join(words)}"
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), shown
        if words[0] == "pip":
            named = re.findall(r"\[([\w,-]+)\]", shlex.join(words))
            assert set(",".join(named).split(",")) <= {*extras, ""}, shown
        if words[0] == "python" and words[1] != "-m":
            script = (ROOT / words[1]).read_text()
            for option in (word for word in words[2:] if word.startswith("--")):
                field = option.removeprefix("--").replace("-", "_")
                assert re.search(rf'^    {field}: |"{option}"', script, re.MULTILINE), shown


# ------------------------------------------------------------------------------ links and figures


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", PAGES[page], flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"\s+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(str(target.resolve().relative_to(ROOT))), link


@pytest.fixture(scope="module")
def docs_script():
    """`docs_script(name)`: a module of docs/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module


def test_tables_are_those_of_the_result_files_and_the_library(docs_script):
    tables = docs_script("tables")
    shown = set()
    for page, text in PAGES.items():
        assert tables.rewritten(text) == text, f"{page} is old: run python docs/tables.py"
        shown |= set(re.findall(r"<!-- table: (\w+) -->", text))
    assert shown == tables.TABLES.keys()


def test_the_ring_in_the_figure_is_that_of_the_library(docs_script):
    """Chunk c starts at worker c + 1 and ends at worker c, as its page says."""
    paths = docs_script("figures").ring_paths(5)
    for chunk, visited in enumerate(paths):
        assert [int(worker) for worker in visited] == [(chunk + 1 + hop) % 5 for hop in range(5)]


def test_every_public_name_method_and_topology_has_its_page():
    reference = PAGES["docs/api/functions.md"] + PAGES["docs/api/methods.md"]
    for name in dq.__all__:
        assert re.search(rf"^::: [\w.]+\.{name}$", reference, re.MULTILINE), name
    topologies = PAGES["docs/api/topologies.md"]
    exported = re.findall(r"^::: [\w.]+\.(\w+)$", topologies, re.MULTILINE)
    classes = [
        name for name in dq.topologies.__all__ if isinstance(getattr(dq.topologies, name), type)
    ]
    assert sorted(exported) == sorted(classes)
    for cls in (*METHODS.values(), ErrorFeedback, *TOPOLOGIES.values()):
        assert f"::: {cls.__module__}.{cls.__name__}\n" in reference + topologies
        page = cls.__module__.rpartition(".")[2]
        assert {f"docs/methods/{page}.md", f"docs/topologies/{page}.md"} & PAGES.keys()


# ---------------------------------------------------------------------------------------- example


@slow
def test_example_help_names_the_options_that_pages_use():
    command = [sys.executable, str(EXAMPLE), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in ("--checkpoint", "--data", "--method", "--compare", "--fsdp", "--restart"):
        assert option in shown
