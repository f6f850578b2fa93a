"""Python of the pages runs as shown."""

import pytest

from docs.scripts.pages import PAGES, code_blocks, printed, shown

LONG = ("recipes/", "workers/", "extensions", "troubleshooting")  # pages


@pytest.mark.parametrize(
    "page",
    [
        # Whole training steps, and a kernel that is interpreted.
        pytest.param(page, marks=pytest.mark.slow if any(part in page for part in LONG) else ())
        for page in PAGES
        # That of the README makes devices of its own: see test_readme.py.
        if code_blocks(PAGES[page], "python") and page != "README.md" and "research" not in page
    ],
)
def test_python_of_a_page_runs_in_order_and_prints_its_comments(page):
    """In one namespace, on eight devices. A comment behind `print` is the line that it prints."""
    assert printed(page) == shown(page)
