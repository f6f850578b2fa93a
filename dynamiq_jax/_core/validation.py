"""Errors for fields that are not possible: the name, the value, and what to give instead."""

import numbers
from collections.abc import Collection
from typing import Any


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError unless a value is one of several: strings or integers."""
    if value not in choices or isinstance(value, float):  # 256.0 equals 256, but is no size
        raise ValueError(f"{name}={value!r} is not possible. Give one of {tuple(choices)}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless a value is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} is not possible. Give True or False.")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless a value is a whole number from `low` to `high`; 4.0 is 4."""
    whole = _is_number(value) and float(value).is_integer() and low <= value
    if not whole or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{name}={value!r} is not possible. Give an integer {span}.")


def check_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise ValueError unless a value is a number from `low` to `high`."""
    if not (_is_number(value) and low <= value <= high):
        raise ValueError(
            f"{name}={value!r} is out of range. Give {remedy or f'{low:g} to {high:g}'}."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
