"""Parse `{% generation %} ... {% endgeneration %}`, which encloses the text to learn in a template.

The block leaves a mark before and behind its text. `split` takes the marks out of the rendered
text again.
"""

import re
from typing import NamedTuple

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

# Unicode reserves these for the inside of programs.
OPEN, CLOSE = "\ufdd0", "\ufdd1"


class Part(NamedTuple):
    """A stretch of a rendered chat."""

    text: str
    learned: bool  # whether the model learns to say it


class GenerationBlock(Extension):
    """Parse the block in templates of an environment."""

    tags = {"generation"}  # noqa: RUF012 A jinja2 extension has its tags here.

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Put a mark on either side of the block's body, which stays in its scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (OPEN, CLOSE)
        )
        return [opened, *body, closed]


def has_generation(template: nodes.Template) -> bool:
    """Tell whether a parsed template has a generation block anywhere."""
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
