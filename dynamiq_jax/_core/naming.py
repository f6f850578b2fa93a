"""Objects from names: NAME[:NUMBER][:FIELD=VALUE]..., as tables and the command line print them."""

import ast
import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

_BUDGETS = ("bits", "code_bits")  # the field that a bare number sets: the first of these


def head(text: str) -> str:
    """Return the name without its options: "dynamiq" of "dynamiq:5"."""
    return text.partition(":")[0]


def field_names(factory: Callable[[], Any]) -> set[str]:
    """Return the names of the fields of `factory()`."""
    return {field.name for field in dataclasses.fields(factory()) if field.init}


def make(
    argument: str,
    text: str,
    known: Mapping[str, Callable[[], Any]],
    hint: str = "",
    named: Mapping[str, Callable[[str], Any]] | None = None,
) -> Any:
    """Make an object of a known name with changed fields.

    The hint is added to the error about a word that is not an option. Values of the fields in
    `named` are names, which its functions take.
    """
    name, *options = text.split(":")
    fields, given = field_names(known[name]), dict[str, Any]()
    takes = f"FIELD=VALUE with a field of {sorted(fields)}" if fields else "the name alone"
    for option in options:
        field, equals, value = option.partition("=")
        number = None if equals else _number(option)
        if not equals:
            field = next((budget for budget in _BUDGETS if budget in fields), "")
            if number is None or not field:
                budget = f"a number of {field}, or " if field else ""
                raise ValueError(
                    f"{argument}={text!r}: {option!r} is not an option of {name}. "
                    f"Give {budget}{takes}." + (hint if number is None else "")
                )
        if field not in fields:
            raise ValueError(f"{argument}={text!r}: {name} has no field {field!r}. Give {takes}.")
        if field in given:
            raise ValueError(f"{argument}={text!r} gives {field!r} a second time. Give it once.")
        given[field] = _literal(value) if number is None else number
    try:
        for field, resolve in (named or {}).items():
            if isinstance(given.get(field), str):
                given[field] = resolve(given[field])
        return dataclasses.replace(known[name](), **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument}={text!r}: {error}") from None


def spelled(value: Any) -> str:
    """Return an object as the call that makes it, with the fields that are not the default."""
    if not dataclasses.is_dataclass(value):
        return type(value).__name__
    given = []
    for field in dataclasses.fields(value):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        setting = getattr(value, field.name)
        if field.init and setting != default:
            nested = dataclasses.is_dataclass(setting)
            given.append(f"{field.name}={spelled(setting) if nested else repr(setting)}")
    return f"{type(value).__name__}({', '.join(given)})"


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return None


def _literal(text: str) -> Any:
    """Return a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, TypeError, ValueError):  # of a set of lists, TypeError
        return text
