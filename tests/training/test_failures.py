"""Effects of a late and of a crashed process on the others, with real processes: local SGD.

Those on an all-reduce in every step are in test_recovery.py, those on DropCompute in
research/tests/drop_compute.
"""

import signal

import numpy as np
import pytest

from tests.support import processes
from tests.support.local_sgd_worker import EVERY, NUM_STEPS, train


def steps_of(rank: int, folder) -> list[int]:
    return sorted(int(path.suffix[1:]) for path in folder.glob(f"{rank}.*"))


@pytest.mark.slow
def test_a_late_worker_holds_up_nobody_before_the_next_synchronization(tmp_path):
    """It begins after the other has taken all local steps that it can, and nothing is lost."""
    ends = processes.run(train, [(tmp_path, "late")] * 2)
    assert steps_of(0, tmp_path) == steps_of(1, tmp_path) == list(range(NUM_STEPS))
    np.testing.assert_array_equal(*ends)
    # Without noise, all coordinates are the same.
    assert 1 < ends[0].min() < ends[0].max() < 1.01 * ends[0].min()


@pytest.mark.slow
def test_a_crash_is_noticed_at_the_next_synchronization(tmp_path):
    """The other takes its local steps alone, and raises an error then, of the all-reduce."""
    with processes.running(train, [(tmp_path, "SIGKILL")] * 2) as (survivor, victim):
        errors = survivor.errors()
        assert survivor.returncode != 0 and "Gloo" in errors
        victim.errors()
        assert victim.returncode == -signal.SIGKILL
    assert steps_of(0, tmp_path) == list(range(EVERY - 1))
    assert steps_of(1, tmp_path) == []
