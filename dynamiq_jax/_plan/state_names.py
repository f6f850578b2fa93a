"""Names of states: each says what the arrays under it belong to.

Two states of equal shapes can belong to other leaves, whose errors one of them holds. A name is the
key of a state in a dictionary. So it is saved with the arrays, JAX compares it as a part of the
structure of a tree, and it costs no array.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynamiq_jax._core.text import listed

_MOST = 40  # characters of the kind and of the paths in a name; the hash has all of them


def state_name(kind: str, leaves: Sequence[str], *facts: Any) -> str:
    """Return the name of a state: its kind, its leaves, and a hash of both and of further facts.

    It is the same in all processes and versions of Python, and fit for the name of a file. Facts
    are numbers, strings, and lists of these.

    >>> state_name("ErrorFeedback", ["layers/0/kernel", "layers/1/kernel", "layers/2/kernel"], [64])
    'ErrorFeedback-layers_0_kernel_layers_1_kernel_and_1_more-3838df686e3a'
    """
    kind = re.sub(r" at 0x[0-9a-fA-F]+", "", kind)  # functions in fields of a user's method
    text = json.dumps([kind, list(leaves), facts], default=int)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return "-".join((_word(kind)[:_MOST], _readable(leaves), digest))


def check_names(
    argument: str, states: Any, wanted: Iterable[str], *, user: str, remedy: str
) -> None:
    """Raise an error for states that belong to something else.

    It says that `argument` has other names than `wanted`, which `user` need, and ends in `remedy`.

    Raises:
      TypeError: not states by their names.
      ValueError: names that are not those that are needed.
    """
    if not isinstance(states, Mapping):
        raise TypeError(
            f"{argument} is a {type(states).__name__}, not a dictionary of states by their names, "
            f"as init returns it. {remedy}"
        )
    held, needed = {*states}, {*wanted}
    extra, missing = sorted(held - needed), sorted(needed - held)
    if not extra and not missing:
        return
    nothing = "no other" if held & needed else "no state"
    shown = [listed(list(map(repr, names))) or nothing for names in (extra, missing)]
    raise ValueError(
        f"{argument} has {shown[0]}, but {user} need {shown[1]}{_difference(extra, missing)}. "
        f"{remedy}"
    )


def _difference(extra: Sequence[str], missing: Sequence[str]) -> str:
    """Return the kind of the difference between two sets of names, or nothing for an empty set."""
    if not extra or not missing:
        return ""
    for place, parts in enumerate(("kinds", "leaves")):
        ours, theirs = (
            {"".join(name.split("-")[place:][:1]) for name in names} for names in (extra, missing)
        )
        if ours != theirs:
            return f": the {parts} differ"
    return ": further leaves, shapes or shards differ"


def _readable(leaves: Sequence[str]) -> str:
    """Join as many paths as fit, and the number of all others."""
    shown, length = list[str](), 0
    for leaf in leaves:
        word = _word(leaf) or "tree"
        length += len(word) + 1
        if shown and length > _MOST:
            break
        shown.append(word[-_MOST:].strip("_"))
    more = [f"and_{len(leaves) - len(shown)}_more"] if len(leaves) > len(shown) else []
    return "_".join(shown + more)


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
