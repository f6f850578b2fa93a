"""Codes of every width by the Mosaic TPU kernels, which need the arithmetic of optimized programs.

A code of many bits shows the last bit of a sum.
"""

import pytest

from tests.kernels.test_mosaic_tpu import WIDE, check_hop

pytestmark = [pytest.mark.optimized, pytest.mark.slow]


def test_codes_of_all_widths_are_those_of_the_base():
    check_hop(131, 2, "bfloat16", WIDE)


@pytest.mark.parametrize("width", [8, 9])  # on both sides of the limits of a byte
def test_codes_of_a_width_are_those_of_the_base(width):
    check_hop(40, 1, "float32", {"widths": (0, width), "bits": width - 0.7})
