"""README and documentation: commands and links exist, tables match the result files, and the
reference has all public names.
"""

import importlib
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
import types
from pathlib import Path

import pytest

import dynamiq_jax as dq
import dynamiq_research
import pallas_kernels
from docs.scripts.pages import PAGES, ROOT, code_blocks
from dynamiq_jax import _commands, islands, parts
from dynamiq_jax.islands import merging, messages
from dynamiq_jax.methods import METHODS
from dynamiq_jax.parts import collectives
from dynamiq_jax.topologies import TOPOLOGIES

NOTEBOOK = "examples/first_compressed_step"
OTHERS = {f"{NOTEBOOK}.ipynb", "benchmarks/README.md"}  # pages that are neither there nor in docs/
COMMANDS = ("bench", "advise", "compare", "doctor", "verify", "islands")


def shell_lines() -> list[tuple[str, list[str]]]:
    """Every command in a page as words, without the variables set in front of it."""
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


def class_name(command: str) -> str:
    """The class of `bench` is Bench."""
    return {"islands": "ShowIslands"}.get(command, command.title())


def file_of(module: str) -> Path:
    """The file that `python -m MODULE` runs."""
    folder = ROOT / "research" if module.startswith("dynamiq_research") else ROOT
    path = (folder / module.replace(".", "/")).with_suffix(".py")
    return path if path.is_file() else path.with_suffix("") / "__main__.py"


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
        module = importlib.import_module(f"{_commands.__name__}.{name}")
        command = getattr(module, class_name(name))
        monkeypatch.setattr(command, "run", lambda self: started.append(self) or 0)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        _commands.main()
    assert ended.value.code == 0
    assert [type(command).__name__ for command in started] == [class_name(words[1])]


def test_targets_and_extras_of_commands_exist():
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


def test_python_runs_modules_that_exist():
    """Also in running text. Nothing is run as a file."""
    found = [
        (page, module)
        for page, text in PAGES.items()
        for module in re.findall(r"\bpython -m ([\w.]*\w)", text)
    ]
    assert {"benchmarks.speed.codec", "docs.scripts.tables"} <= {module for _, module in found}
    assert [(page, module) for page, module in found if not file_of(module).is_file()] == []
    files = [(page, words) for page, words in shell_lines() if words[0] == "python"]
    assert [(page, words) for page, words in files if words[1] != "-m"] == []


def test_help_of_modules_names_the_options_that_pages_use(monkeypatch, capsys):
    used: dict[str, set[str]] = {}
    for _, words in shell_lines():
        options = {word for word in words if word.startswith("--")}
        if words[:2] == ["python", "-m"] and options:
            used.setdefault(words[2], set()).update(options)
    assert {"benchmarks.error.dump_gradients", "examples.finetune_llm"} <= used.keys()
    for module, options in used.items():
        monkeypatch.setattr(sys, "argv", [module, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(file_of(module)), run_name="__main__")
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert {option for option in options if option not in shown} == set(), module


# ------------------------------------------------------------------------------ links and figures


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", PAGES[page], flags=re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    # The reference of a class has its name as anchor.
    documented = re.findall(r"^::: ([\w.]+)$", PAGES[page], flags=re.MULTILINE)
    return {*(re.sub(r"\s+", "-", heading) for heading in plain), *documented}


def test_titles_are_no_noun_clauses():
    """They name a thing, or ask a question and end in its mark."""
    clause = r"^#+ ((?:What|How|Which|Whose|When|Where|Whether|Why)\b.*[^?\n])$"
    found = [
        (page, title)
        for page, text in PAGES.items()
        for title in re.findall(clause, text, flags=re.MULTILINE)
    ]
    assert found == []


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


def linked(page):
    """Files that a page links to."""
    targets = (link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]))
    paths = ((ROOT / page).parent / target for target in targets if "://" not in target)
    return {str(path.resolve().relative_to(ROOT)) for path in paths}


def navigation():
    """Files that the navigation of the site leads to, which is on every page."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = set(re.findall(r": ([\w/]+\.md)$", nav, flags=re.MULTILINE)) - {"index.md"}
    found = {next((p for p in (f"docs/{name}", name) if p in PAGES), name) for name in named}
    return {name.replace(f"{NOTEBOOK}.md", f"{NOTEBOOK}.ipynb") for name in found}


def test_two_clicks_lead_from_the_readme_to_every_page():
    near = linked("README.md")
    reached = near.union({"README.md"}, *map(linked, near & PAGES.keys()))
    assert (PAGES.keys() | OTHERS) - reached == set()


def test_one_click_leads_from_the_home_page_of_the_site_to_every_page():
    assert navigation() ^ ((PAGES.keys() | OTHERS) - {"README.md"}) == set()


def test_captions_of_emulated_hosts_say_so():
    figures = "time_to_accuracy.png|time_to_accuracy_local_sgd.png|cost_model.png|first_figure.svg"
    pattern = rf"^!\[[^]]*\]\([^)]*/(?:{figures})\)\n\n(.*)$"
    captions = [
        (page, caption)
        for page, text in PAGES.items()
        for caption in re.findall(pattern, text, flags=re.MULTILINE)
    ]
    assert {page for page, _ in captions} >= {"README.md", "docs/results.md"}
    wrong = [(page, text) for page, text in captions if "emulated on two CPU cores" not in text]
    assert wrong == []


def test_every_result_file_is_in_a_table_or_a_figure():
    tables = "\n".join(path.read_text() for path in (ROOT / "docs/scripts").glob("*.py"))
    text = "\n".join(PAGES.values())

    def is_shown(path):
        in_figure = f"results/{path.stem}.png)" in text  # numbers are kept beside it
        in_table = re.search(rf'"(research/)?{path.stem}(\.json)?"', tables) is not None
        return in_figure or (in_table and path.suffix == ".json")

    files = [*(ROOT / "benchmarks/results").iterdir()]
    files += (ROOT / "research/benchmarks/results").iterdir()
    unused = [path.name for path in files if not is_shown(path)]
    # `benchmarks.error.allocation` compares with its errors, which an earlier version made.
    assert unused == ["allocation_fitted.json"]


def test_tables_are_those_of_the_result_files_and_the_library():
    """Also sentences whose numbers are measured."""
    tables = importlib.import_module("docs.scripts.tables")
    shown = set()
    for page, text in PAGES.items():
        assert tables.rewritten(text) == text, f"{page} is old: run python -m docs.scripts.tables"
        shown |= set(re.findall(r"<!-- table: (\w+) -->", text))
    assert shown == tables.TABLES.keys()


def test_every_script_is_short_and_on_a_page():
    tables = importlib.import_module("docs.scripts.tables")
    shown = {
        name for text in PAGES.values() for name in re.findall(r"<!-- script: (\w+) -->", text)
    }
    files = {path.stem: path for path in tables.script_files()}
    assert shown == files.keys() - {"finetune_llm", "convert_gguf"}
    for name in shown:
        assert len(files[name].read_text().splitlines()) < 60, name


def test_the_ring_in_the_figure_is_that_of_the_library():
    """Chunk c starts at worker c + 1 and ends at worker c, as on its page."""
    paths = importlib.import_module("docs.scripts.figures").ring_paths(5)
    for chunk, visited in enumerate(paths):
        assert [int(worker) for worker in visited] == [(chunk + 1 + hop) % 5 for hop in range(5)]


# ------------------------------------------------------------------------------------ public names


def reference() -> set[str]:
    """Identifiers that the reference pages document."""
    pages = "\n".join(text for page, text in PAGES.items() if page.startswith("docs/api/"))
    return set(re.findall(r"^::: ([\w.]+)$", pages, flags=re.MULTILINE))


def test_the_reference_has_every_public_name_and_no_private_one():
    facades = (dq, dq.methods, dq.reports, dq.topologies, dq.training, parts, collectives)
    facades += (islands, messages, merging, dynamiq_research)
    shown = reference()
    assert [name for name in shown if re.search(r"\b_", name)] == []
    public = set()
    for facade in facades:
        for name in facade.__all__:
            value = getattr(facade, name)
            if isinstance(value, types.ModuleType):
                continue
            # A name of several facades is documented once.
            names = {f"{f.__name__}.{name}" for f in facades if getattr(f, name, None) is value}
            assert len(names & shown) == 1, name
            public |= names
    assert {name for name in shown if name.startswith("dynamiq_")} <= public


def test_the_reference_has_every_public_module_of_the_kernels():
    modules = {
        module.name
        for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels.")
        if not module.ispkg and "._" not in module.name
    }
    assert {name for name in reference() if name.startswith("pallas_kernels")} == modules


def test_every_method_and_topology_has_a_page():
    product = {"mx" if name.startswith("mx") else name for name in (*METHODS.own, "error_feedback")}
    for folder, names in (("methods", product), ("research", METHODS.installed)):
        for name in names:
            assert f"docs/{folder}/{name}.md" in PAGES
            assert f"({name}.md)" in PAGES[f"docs/{folder}/index.md"]
    for name in TOPOLOGIES:
        assert f"docs/topologies/{name}.md" in PAGES
        assert f"({name}.md)" in PAGES["docs/topologies/index.md"]


@pytest.mark.parametrize(
    ("page", "folder"),
    (("benchmarks/README.md", "benchmarks"), ("research/README.md", "research/benchmarks")),
)
def test_the_index_of_benchmarks_has_every_script(page, folder):
    index = (ROOT / page).read_text().partition("## Benchmarks")
    rows = re.findall(r"^\| `([^`]+)` \|", index[2] or index[0], re.M)
    listed = {name.split()[0] for name in rows}
    scripts = set()
    for path in (ROOT / folder).rglob("*.py"):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        name = ".".join(part for part in parts if not part.startswith("__"))
        # Other scripts start the hosts of emulated networks.
        command = f"python -m {folder.replace('/', '.')}.{name}"
        if name and command in path.read_text() and not name.endswith("host"):
            scripts.add(name)
    assert listed - {"dynamiq-jax"} == scripts


# ------------------------------------------------------------------------------ sizes of pages


def test_pages_are_short():
    """One that leads to others, one to follow in ten minutes, one to read first, and all."""
    words = {page: len(text.split()) for page, text in PAGES.items() if "research/" not in page}
    assert words["README.md"] <= 600
    assert words["docs/getting_started.md"] <= 500
    assert words["docs/architecture.md"] <= 2_500
    assert sum(words.values()) - words["CONTRIBUTING.md"] <= 50_000
