"""The block `{% generation %} ... {% endgeneration %}`, which encloses what a model learns to say.

The block renders a mark before and after its text. `split` removes the marks from the rendered
text.
"""

import re
from typing import NamedTuple

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

# Noncharacters, which Unicode reserves for the internal use of programs.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Part(NamedTuple):
    """A part of a rendered chat."""

    text: str
    learned: bool  # True if the model learns to say it


class GenerationBlock(Extension):
    """Jinja extension with the block."""

    tags = {"generation"}  # noqa: RUF012 A jinja2 extension declares its tags like this.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse a block into its body, which stays in its scope, between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (OPEN, CLOSE)
        )
        return [opened, *body, closed]


def has_generation(template: nodes.Template) -> bool:
    """Return whether a parsed template has a generation block."""
    return any(node.data == OPEN for node in template.find_all(nodes.TemplateData))


def split(rendered: str) -> list[Part]:
    """Split a rendered text at its marks.

    Args:
      rendered: text with marks; blocks may be nested.

    Returns:
      The text without the marks, in parts that are not empty.

    Raises:
      ValueError: a mark has no counterpart.
    """
    parts, depth = [], 0
    for piece in re.split(f"([{OPEN}{CLOSE}])", rendered):
        if piece == OPEN:
            depth += 1
        elif piece == CLOSE:
            depth -= 1
        elif piece:
            parts.append(Part(piece, depth > 0))
        if depth < 0:
            break
    if depth:
        raise ValueError(
            "leaves a generation block before its end. Move break, continue and filters out of "
            "the block"
        )
    return parts
