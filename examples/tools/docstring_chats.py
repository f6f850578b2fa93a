"""Conversations from the standard library: a function, and the docstring that answers.

    python -m examples.tools.docstring_chats chats.jsonl

They come with every Python, under its license, PSF-2.0. A fine-tuned model documents functions.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tyro

from examples.tools.document_files import write_documents

QUESTION = "Write the docstring of this Python function.\n\n```python\n{}\n```"
# Characters of a function and of a docstring: a conversation fits a row of 512 tokens.
FUNCTION, DOCSTRING = (80, 1000), (40, 600)
SKIPPED = ("site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data")
CONTROL_TOKEN = re.compile(r"<\|?\w+\|?>")  # such as <filename>: no message may spell one
SEED = 0


def main(file: tyro.conf.Positional[Path], count: int | None = None) -> None:
    """Write conversations, in a random order that is always the same.

    Args:
      file: the .jsonl file to write.
      count: number of conversations; None for all, about 3,200.
    """
    write_documents(file, conversations()[:count])


def conversations() -> list[list[dict[str, str]]]:
    """Return all conversations: messages of a user and of the assistant.

    Raises:
      FileNotFoundError: this Python has no source code of its standard library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    pairs = {}  # an answer that is repeated would be in both parts of a split
    for file in sorted(root.rglob("*.py")):
        if not set(SKIPPED) & set(file.relative_to(root).parts):
            pairs |= {answer: function for function, answer in documented(file)}
    if not pairs:
        raise FileNotFoundError(
            "This Python has no source code of its standard library. Use one that has it, such as "
            "one from python.org."
        )
    chats = [
        [
            {"role": "user", "content": QUESTION.format(function)},
            {"role": "assistant", "content": answer},
        ]
        for answer, function in pairs.items()
    ]
    order = np.random.default_rng(SEED).permutation(len(chats))
    return [chats[index] for index in order]


def documented(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the functions of a module without their docstrings, and their docstrings."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # Some files of tests are broken on purpose.
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (answer := ast.get_docstring(node)):
            continue
        del node.body[0]
        function = ast.unparse(node) if node.body else ""
        sizes = (len(function), *FUNCTION), (len(answer), *DOCSTRING)
        fits = all(low <= size <= high for size, low, high in sizes)
        if fits and not CONTROL_TOKEN.search(function + answer):
            yield function, answer


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.tools.docstring_chats")
