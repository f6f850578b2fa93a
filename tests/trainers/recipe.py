"""The lines of a recipe, as its page shows them."""

import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "recipes"


def run_lines(page: str, section: str, names: dict[str, Any], method: str = "dynamiq") -> None:
    """Execute the blocks of code in a section of a page.

    Args:
      page: name of a file in docs/recipes.
      section: heading; the text above the first one is that of "".
      names: what the lines use, and what they define.
      method: compression in place of the default one.
    """
    text = (PAGES / page).read_text()
    parts = re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)
    sections = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    blocks = re.findall(r"^```py\n(.*?)^```$", sections[section], re.DOTALL | re.MULTILINE)
    assert blocks, f"{page} has no code in {section!r}"
    changed = "\n".join(blocks)
    if method != "dynamiq":
        changed = changed.replace('axis_name="data"', f'axis_name="data", method={method!r}')
        changed = re.sub(r"(dq\.compress\(.*?, )", rf"\1method={method!r}, axis_name=", changed)
        changed = changed.replace('"dynamiq:8"', repr(method))
    exec(compile(changed, f"{page}, {section}", "exec"), names)
