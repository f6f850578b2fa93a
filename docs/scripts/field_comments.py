"""Documentation of fields and constants in the reference, from the comments beside them."""

import ast
import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Extension that takes the comment of an annotated name as its docstring:

    bits: float = 5.0  # per coordinate
    """

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **_: Any) -> None:
        """Set the docstring of a field of a class, or of a constant of a module."""
        is_public = attr.parent is not None and not attr.name.startswith("_")
        if not is_public or attr.docstring or not isinstance(node, ast.AnnAssign):
            return
        lines = [line.strip() for line in attr.parent.lines_collection[attr.filepath]]
        comment = _comment(lines, node.lineno - 1, (node.end_lineno or node.lineno) - 1)
        if comment:
            attr.docstring = griffe.Docstring(comment, parent=attr)


def _comment(lines: list[str], first: int, last: int) -> str:
    """Return the comment on the last line of a statement with the lines that continue it, or else
    the lines above the statement.
    """
    start, behind = first, lines[last].partition("  # ")[2]
    if not behind:
        while lines[start - 1].startswith("# "):
            start -= 1
        return _joined(lines[start:first])
    end = last + 1
    while end < len(lines) and lines[end].startswith("# "):
        end += 1
    # Comment lines above a field without a comment of its own belong to that field.
    is_above_next = end < len(lines) and re.match(r"\w+: (?!.*  # )", lines[end])
    return behind if is_above_next else _joined([f"# {behind}", *lines[last + 1 : end]])


def _joined(lines: list[str]) -> str:
    return " ".join(line.removeprefix("# ") for line in lines)
