"""Errors for fields that are not possible: the name, the value, and what to give instead."""

import numbers
from collections.abc import Collection
from typing import Any


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError unless a value is one of several."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not possible. Give one of {tuple(choices)}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless a value is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} is not possible. Give True or False.")


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless a value is a whole number from `low` to `high`."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    whole = is_number and float(value).is_integer()  # 4.0 is 4
    if not (whole and low <= value and (high is None or value <= high)):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{name}={value!r} is not possible. Give an integer {span}.")


def check_share(name: str, value: Any) -> None:
    """Raise ValueError unless a value is a share: above 0, at most 1."""
    if not (isinstance(value, numbers.Real) and 0 < value <= 1):
        raise ValueError(f"{name}={value!r} is not a share. Give a number above 0, up to 1.")


def check_positive(name: str, value: Any, *, zero: bool = False) -> None:
    """Raise ValueError unless a value is a positive number, or zero where that is possible."""
    if not (isinstance(value, numbers.Real) and (float(value) > 0 or (zero and value == 0))):
        raise ValueError(f"{name}={value!r} is not possible. Give a positive number.")


def check_power_of_two(name: str, value: Any, low: int, high: int) -> None:
    """Raise ValueError unless a value is a power of two from `low` to `high`."""
    if type(value) is not int or not low <= value <= high or value & (value - 1):
        raise ValueError(
            f"{name}={value!r} is not possible. Give a power of two from {low} to {high}."
        )
