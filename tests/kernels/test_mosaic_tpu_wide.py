"""Codes of all widths by the Mosaic TPU kernels, which need the arithmetic of optimized programs.

A code of 16 bits shows the last bit of a sum.
"""

import pytest

from tests.kernels.test_mosaic_tpu import WIDE, check_hop

pytestmark = [pytest.mark.optimized, pytest.mark.slow]


@pytest.mark.parametrize("received", [1, 2])
def test_a_hop_writes_the_bytes_of_the_base(received):
    check_hop(131, received, "bfloat16", WIDE)
