"""Python of the pages of research runs as shown."""

import pytest

from docs.scripts.pages import PAGES, code_blocks, printed, shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "research" in page and code_blocks(PAGES[page], "python")]
)
def test_python_of_a_page_runs_in_order_and_prints_its_comments(page):
    assert printed(page) == shown(page)
