"""Static values of a call, which are constants of its program."""

import dataclasses
from collections.abc import Hashable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Static:
    """A static value, equal to others of the same value and the same types at any depth.

    In Python, 1, 1.0 and True are equal, and so are 0.0 and -0.0. Programs with them differ.
    """

    value: Any = dataclasses.field(compare=False)
    typed: Hashable  # the value with all types in it


def static_value(name: str, value: Any) -> Static:
    """Make a static value.

    Args:
      name: name of the argument, for errors.
      value: the value.

    Raises:
      ValueError: a value that cannot be hashed.
    """
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{name} is {value!r:.80}, which is neither an array nor a number, and cannot be "
            "hashed. Give an array, or a value that can be, such as a frozen dataclass; or leave "
            "it out of the arguments, as in functools.partial(loss_fn, ...)."
        ) from None
    return Static(value, _typed(value))


def _typed(value: Any) -> Hashable:
    if type(value) in (float, complex):
        return type(value), repr(value)  # with the sign of zero
    parts: Hashable = ()
    if isinstance(value, tuple):
        parts = tuple(map(_typed, value))
    elif isinstance(value, frozenset):
        parts = frozenset(map(_typed, value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        parts = tuple(_typed(getattr(value, name)) for name in compared)
    try:
        hash(value)
    except TypeError:  # a field of a dataclass that hashes in another way
        return type(value), parts
    return type(value), value, parts
