"""Names of the parts of a collective in compiled programs, which profiles and `inspect` show."""

import re
from typing import Any

import jax

_PREFIX = "dynamiq_jax."
EXACT = "exact"  # leaves that are not compressed
FAST = "fast axes"  # exact sums and gathers beside the slow axis
ESTIMATE = "estimate"  # of errors
STATES = "states"  # the check that states belong to their workers
FALLBACK = "fallback"  # the exact sum above a limit


def scope(label: str) -> Any:
    """Return a context, or a decorator, in which operations have a label in their names."""
    return jax.named_scope(f"{_PREFIX}{label}")


def labels(source: str) -> tuple[str, ...]:
    """Return the labels in the name of an operation, from the outermost to the innermost.

    >>> labels("jit(step)/shard_map/dynamiq_jax.DynamiQ(bits=4)/while/body/ppermute")
    ('DynamiQ(bits=4)',)
    """
    names = []
    for match in re.finditer(re.escape(_PREFIX), source):
        rest, depth, end = source[match.end() :], 0, 0
        while end < len(rest):
            depth += {"(": 1, ")": -1}.get(rest[end], 0)
            if depth < 0 or (rest[end] == "/" and depth == 0):
                break
            end += 1
        names.append(rest[:end])
    return tuple(names)
