"""Errors for fields that are not possible, with the name, the value and a remedy."""

import numbers
from collections.abc import Collection
from typing import Any

import jax
import optax


class MistakeError(ValueError):
    """Error of a call in which compression is useless or wrong, of a kind that `inspect` has."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError unless a value is one of several: strings or integers."""
    if value not in choices or isinstance(value, float):  # 256.0 equals 256, but is no size
        raise ValueError(f"{name}={value!r} is not possible. Give one of {tuple(choices)}.")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless a value is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} is not possible. Give True or False.")


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, of Python or NumPy. Booleans are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless a value is an integer from `low` to `high`, of Python or NumPy."""
    if not is_integer(value) or value < low or (high is not None and value > high):
        span = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(f"{name}={value!r} is not possible. Give an integer {span}.")


def check_seed(value: Any) -> None:
    """Raise ValueError unless a seed is an integer of 32 bits: JAX takes others inside a map."""
    if not (is_whole_array(value) or (is_integer(value) and -(2**31) <= value < 2**32)):
        raise ValueError(
            f"seed={value!r:.80} is not possible. Give an integer of 32 bits, the same on all "
            "workers."
        )


def is_whole_array(value: Any) -> bool:
    """Return whether a value is an array of one integer, as `optax.inject_hyperparams` makes."""
    return isinstance(value, jax.Array) and value.shape == () and value.dtype.kind in "iu"


def check_number(name: str, value: Any, low: float, high: float, remedy: str = "") -> None:
    """Raise ValueError unless a value is a number from `low` to `high`; `remedy` names others."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):
        raise ValueError(
            f"{name}={value!r} is out of range. Give {remedy or f'{low:g} to {high:g}'}."
        )


def check_optimizer(name: str, value: Any, example: str) -> None:
    """Raise TypeError unless a value is an optax transformation, such as the example."""
    if not isinstance(value, optax.GradientTransformation):
        raise TypeError(
            f"{name}={value!r:.80} is not an optax transformation. Give one, such as {example}."
        )
