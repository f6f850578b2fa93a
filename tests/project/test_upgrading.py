"""The page on upgrading: code before a change is refused, and code after it runs."""

import re

import pytest

from tests.project.test_docs import PAGES, code_blocks

PAGE = PAGES["docs/upgrading.md"]
LINES = [line for block in code_blocks(PAGE, "diff") for line in block.splitlines()]
BEFORE = [line[2:] for line in LINES if line.startswith("- ")]
AFTER = [line[2:] for line in LINES if line.startswith("+ ")]


@pytest.fixture(scope="module")
def names():
    """Those of the first block of the page."""
    namespace: dict = {}
    exec(code_blocks(PAGE, "python")[0], namespace)
    return namespace


def test_every_line_of_a_change_is_removed_or_added():
    assert BEFORE and AFTER and len(BEFORE) + len(AFTER) == len(LINES)


@pytest.mark.parametrize("line", BEFORE)
def test_code_before_a_change_is_refused(line, names):
    with pytest.raises((TypeError, AttributeError, ImportError, KeyError)) as refused:
        exec(line, dict(names))
    words = re.findall(r"'([\w.]+)'", str(refused.value)) or [str(refused.value)]  # of a KeyError
    assert any(word in line for word in words)


@pytest.mark.parametrize("line", AFTER)
def test_code_after_a_change_runs(line, names):
    exec(line, dict(names))
