"""Shows the comment behind a field of a dataclass as its documentation in the reference."""

import ast
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """An option says what it is where it is declared: `bits: float = 5.0  # per coordinate`."""

    def on_attribute_instance(self, *, node: ast.AST, attr: griffe.Attribute, **_: Any) -> None:
        """Takes the comment on the last line and those below it, or else those above."""
        is_field = (
            attr.parent is not None and attr.parent.is_class and not attr.name.startswith("_")
        )
        if not is_field or attr.docstring or not isinstance(node, ast.AnnAssign):
            return
        lines = attr.parent.lines_collection[attr.filepath]
        first, last = node.lineno - 1, node.end_lineno
        behind = lines[last - 1].partition("  # ")[2]
        comments = [behind] if behind else []
        if behind:
            while lines[last].strip().startswith("# "):
                comments.append(lines[last].strip().removeprefix("# "))
                last += 1
        while not behind and lines[first - 1].strip().startswith("# "):
            first -= 1
            comments.insert(0, lines[first].strip().removeprefix("# "))
        if comments:
            attr.docstring = griffe.Docstring(" ".join(comments), parent=attr)
