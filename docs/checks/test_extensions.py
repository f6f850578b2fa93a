"""Pages on extensions and research: groups, parts and levels of trust are those of the library."""

import re
import tomllib

import pytest

from docs.scripts.pages import PAGES, code_blocks
from dynamiq_jax import parts
from dynamiq_jax.methods import METHODS
from dynamiq_jax.methods._registry import WRAPPERS
from dynamiq_research import LEVELS

EXTENSIONS = PAGES["docs/extensions.md"]
OVERVIEW = PAGES["docs/research/index.md"]
# Pages of systems that share one.
SYSTEMS = {"top_k": "single_coordinates", "rand_k": "single_coordinates"}
SYSTEMS |= {"allocate_bits": "bit_allocation"}


def system_of(page: str) -> str:
    return SYSTEMS.get(page, page)


def test_entry_points_are_those_that_the_library_reads():
    (block,) = code_blocks(EXTENSIONS, "toml")
    groups = tomllib.loads(block)["project"]["entry-points"]
    assert list(groups) == [METHODS.group, WRAPPERS.group]
    for names in groups.values():
        assert names and not {*names} & {*METHODS, *WRAPPERS}


def test_the_table_of_parts_is_complete():
    section = EXTENSIONS.split("## Parts")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^`|]+ \| (`.*) \|$", section, flags=re.MULTILINE)
    named = re.findall(r"`(\w+)`", "\n".join(rows))
    assert sorted(named) == sorted(parts.__all__)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.startswith("docs/research/") and not p.endswith("index.md")]
)
def test_the_page_of_a_system_opens_with_its_level(page):
    opening = "\n".join(PAGES[page].splitlines()[:4])
    (level,) = re.findall(r"^Level of trust: \[([\w ]+)\]\(index\.md\)\.$", opening, re.MULTILINE)
    assert level == LEVELS[system_of(page.split("/")[-1].removesuffix(".md"))]


def test_the_overview_has_the_level_of_every_system():
    rows = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\) \|[^|]*\| ([\w ]+) \|", OVERVIEW, re.M)
    assert {system_of(page): level for page, level in rows} == LEVELS
    assert len(rows) == len(LEVELS) + 1  # two pages of one system
