"""Checks of fields: what is possible passes, and errors name the field and what to give."""

import math

import numpy as np
import pytest

from dynamiq_jax._core import check_choice, check_flag, check_integer, check_number

NOT_NUMBERS = (None, "4", True, False, math.nan, 1j, [4])


@pytest.mark.parametrize("value", (2, 8, np.int32(8), np.uint8(3)))
def test_integers_in_range_pass(value):
    check_integer("x", value, 2, 8)


@pytest.mark.parametrize("value", (*NOT_NUMBERS, 1, 9, 4.0, 4.5, -math.inf, math.inf))
def test_other_integers_do_not(value):
    with pytest.raises(ValueError) as info:
        check_integer("x", value, 2, 8)
    assert str(info.value) == f"x={value!r} is not possible. Give an integer from 2 to 8."


def test_an_integer_may_have_no_upper_limit():
    check_integer("x", 1, 1)
    check_integer("x", 10**30, 1)
    for value in (0, -1, 1.5, math.inf):
        with pytest.raises(ValueError, match=r"is not possible\. Give an integer of at least 1\.$"):
            check_integer("x", value, 1)


@pytest.mark.parametrize("value", (0.5, 1, 2.0, np.float32(1.5)))
def test_numbers_in_range_pass(value):
    check_number("x", value, 0.5, 2)


@pytest.mark.parametrize("value", (*NOT_NUMBERS, 0.49, 2.01, math.inf))
def test_other_numbers_do_not(value):
    with pytest.raises(ValueError) as info:
        check_number("x", value, 0.5, 2)
    assert str(info.value) == f"x={value!r} is out of range. Give 0.5 to 2."
    with pytest.raises(ValueError, match=r"Give a share\.$"):
        check_number("x", value, 0.5, 2, "a share")


def test_choices():
    check_choice("x", 32, (32, 64))
    for value in (33, None, "32", 32.0):
        with pytest.raises(ValueError) as info:
            check_choice("x", value, [32, 64])
        assert str(info.value) == f"x={value!r} is not possible. Give one of (32, 64)."


def test_flags():
    check_flag("x", True)
    check_flag("x", False)
    for value in (0, 1, None, "True", np.bool_(True)):
        with pytest.raises(ValueError) as info:
            check_flag("x", value)
        assert str(info.value) == f"x={value!r} is not possible. Give True or False."
