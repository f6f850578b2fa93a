"""Made-up gradients have the magnitudes that their pages name."""

import numpy as np
import pytest

from dynamiq_jax._measurement.gradients import worker_gradients


def test_magnitudes_of_rows_spread_by_two_and_a_half_octaves():
    drawn = worker_gradients(2, 2**19, seed=0)
    sizes = np.log2(np.linalg.norm(drawn[0].reshape(-1, 256), axis=1))
    assert np.std(sizes) == pytest.approx(2.5, rel=0.05)
