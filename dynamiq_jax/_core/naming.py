"""Objects from names: NAME[:NUMBER][:FIELD=VALUE]..., as tables and the command line print them."""

import ast
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_BUDGETS = ("bits", "code_bits")  # the field that a bare number sets: the first of these


def head(text: str) -> str:
    """Return the name without its options.

    >>> head("dynamiq:5")
    'dynamiq'
    """
    return text.partition(":")[0]


def field_names(factory: Callable[[], Any]) -> set[str]:
    """Return the fields that options can set of what `factory()` makes."""
    return {field.name for field in dataclasses.fields(factory()) if field.init}


def make(argument: str, text: str, known: Mapping[str, Callable[[], Any]]) -> Any:
    """Make an object with changed fields.

    Args:
      argument: name of the argument, for errors.
      text: a name that is known, then options.
      known: name to a function that makes the object with its default fields.

    Raises:
      ValueError: an option is not possible.
    """
    name, *options = text.split(":")
    fields, given = field_names(known[name]), dict[str, Any]()
    for option in options:
        field, equals, value = option.partition("=")
        if not equals:
            field, value = next((b for b in _BUDGETS if b in fields), ""), option
            if not (field and _is_number(option)):
                raise ValueError(
                    f"{argument}={text!r}: {option!r} is not an option of {name}. "
                    + (f"Give a number of {field}, or " if field else "Give ")
                    + f"FIELD=VALUE with a field of {sorted(fields)}."
                )
        if field not in fields:
            raise ValueError(
                f"{argument}={text!r}: {name} has no field {field!r}. It has {sorted(fields)}."
            )
        if field in given:
            raise ValueError(f"{argument}={text!r} gives {field!r} a second time. Give it once.")
        given[field] = _literal(value)
    try:
        return dataclasses.replace(known[name](), **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}={text!r}: {error}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _literal(text: str) -> Any:
    """Return a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):  # of a set of lists, TypeError
        return text
