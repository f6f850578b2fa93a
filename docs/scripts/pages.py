"""The pages of both houses, and the code that they show."""

import contextlib
import io
import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "research" / "README.md",
    )
}


def code_blocks(text: str, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def printed(page: str) -> list[str]:
    """Run the Python of a page in one namespace, and return the lines that it prints."""
    namespace: dict[str, object] = {}
    lines = io.StringIO()
    # The tests are stricter than the default of JAX.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(lines):
        for block in code_blocks(PAGES[page], "python"):
            exec(compile(block, page, "exec"), namespace)
    return [line.strip() for line in lines.getvalue().splitlines()]


def shown(page: str) -> list[str]:
    """Return the lines that the code of a page prints, by the comments behind them."""
    code = "\n".join(code_blocks(PAGES[page], "python"))
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
