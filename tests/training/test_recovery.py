"""A process that dies or hangs inside an all-reduce: the other ends with an error by itself, and
the same command, run again, goes on from the last checkpoint as if nothing had happened.
"""

import pathlib
import signal

import numpy as np
import pytest

from tests.support import processes
from tests.support import recovery_worker as worker
from tests.support.recovery_worker import FAULTY_STEP, NUM_STEPS

LONG, SHORT = 100, 8  # heartbeat time-outs in seconds: JAX's own, and one worth waiting for
slow = pytest.mark.slow
SERVICE = "the JAX distributed service detected fatal errors"


def train(folder: pathlib.Path) -> list[dict[str, np.ndarray]]:
    """What the ranks end with, when trained from the last checkpoint in the folder."""
    return processes.run(worker.train, [(folder, "none")] * 2)


def checkpoints(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What both ranks end with when nothing happens."""
    ends = train(tmp_path_factory.mktemp("uninterrupted"))
    assert ends[0]["first"] == 0
    for name, leaf in ends[0].items():
        np.testing.assert_array_equal(ends[1][name], leaf)
    np.testing.assert_array_equal(ends[0]["forgetful"], ends[0]["params"])  # nothing to forget yet
    return ends[0]


@pytest.mark.parametrize(
    "victim, fault, heartbeat, told",
    (
        # gloo sees the connection close and raises; to exit takes `shutdown_timeout_seconds`.
        pytest.param(
            1, signal.SIGKILL, LONG, "JaxRuntimeError: UNKNOWN: Gloo", id="killed", marks=slow
        ),
        # The connection to the coordinator closes too, without which JAX aborts a process.
        pytest.param(0, signal.SIGKILL, LONG, SERVICE, id="coordinator_killed", marks=slow),
        # Nothing closes, but heartbeats are missed after `heartbeat_timeout_seconds`.
        pytest.param(1, signal.SIGSTOP, SHORT, "heartbeat", id="stalled", marks=slow),
    ),
)
def test_the_other_ends_and_a_rerun_has_the_same_bits(
    victim, fault, heartbeat, told, uninterrupted, tmp_path
):
    faults = [fault.name if rank == victim else "none" for rank in range(2)]
    arguments = [(tmp_path, name) for name in faults]
    with processes.running(worker.train, arguments, heartbeat=heartbeat) as running:
        survivor = running[1 - victim]
        errors = survivor.errors()
        assert survivor.returncode != 0 and told in errors
        if fault == signal.SIGSTOP:
            assert running[victim].returncode is None
        else:
            running[victim].errors()
            assert running[victim].returncode == -signal.SIGKILL
    assert checkpoints(tmp_path) == list(range(1, FAULTY_STEP + 1))

    resumed, other = train(tmp_path)
    assert checkpoints(tmp_path) == list(range(1, NUM_STEPS + 1))
    assert resumed["first"] == other["first"] == FAULTY_STEP
    for name in set(uninterrupted) - {"first", "forgetful"}:
        np.testing.assert_array_equal(resumed[name], uninterrupted[name])
        np.testing.assert_array_equal(other[name], uninterrupted[name])
    # The all-reduce's state matters: without it the noise of the first steps would come again.
    assert np.any(resumed["forgetful"] != uninterrupted["params"])
    assert np.all(np.isfinite(resumed["forgetful"]))
