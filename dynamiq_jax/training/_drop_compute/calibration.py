"""Choice of a compute threshold from the latencies that all processes recorded."""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils

from dynamiq_jax._core.validation import check_integer, check_number
from dynamiq_jax.training._drop_compute.model import (
    Latencies,
    Table,
    ThresholdEffect,
    choose_threshold,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """First steps of a run, without a threshold, from whose latencies one is chosen.

    The defaults are those of the paper's code, and `max_drop` is the most that it reports without a
    loss of accuracy.
    """

    skip: int = 5  # first steps, which compile, and are not recorded
    steps: int = 45  # recorded steps
    max_drop: float = 0.1  # share of micro-batches that the threshold may drop
    candidates: int = 200  # thresholds to try; see `choose_threshold`

    def __post_init__(self):
        check_integer("skip", self.skip, 0)
        check_integer("steps", self.steps, 1)
        check_integer("candidates", self.candidates, 2)
        check_number("max_drop", self.max_drop, 0, 1)


class Recorder:
    """Latencies of the workers of this process, until there are enough to choose a threshold."""

    def __init__(self, calibration: Calibration):
        self._calibration = calibration
        self._steps: list[Table] = []

    def check(self, micro_batches: int) -> None:
        """Raise ValueError for another number of micro-batches than in the steps before."""
        before = self._steps[0].shape[1] - 1 if self._steps else micro_batches
        if micro_batches != before:
            raise ValueError(
                f"micro_batches has length {micro_batches}, and {before} in the steps before. Give "
                "as many in every step until a threshold is chosen."
            )

    def add(self, times: Table, rest: Table) -> bool:
        """Add a step: seconds [workers, micro_batches], and [workers] of the rest of the step.

        Returns:
          Whether all steps are there.
        """
        step = np.concatenate([times, rest[:, None]], axis=1)
        self._steps.append(step)
        return len(self._steps) == self._calibration.skip + self._calibration.steps

    def share(self) -> Latencies:
        """Gather the recorded steps of all processes, and start again.

        Every process has to call this at the same step.

        Raises:
          ValueError: processes have other numbers of workers or of micro-batches.
        """
        own = np.stack(self._steps[self._calibration.skip :])
        self._steps = []
        shapes = gathered(np.asarray(own.shape))
        if (shapes != shapes[0]).any():
            raise ValueError(
                "Processes have other numbers of steps, workers or micro_batches: "
                f"{[tuple((s - (0, 0, 1)).tolist()) for s in shapes]}. Give the same to each."
            )
        table = np.concatenate(list(gathered(own.astype(np.float32)).astype(np.float64)), axis=1)
        # The last worker to stop waits for nobody: all others see its delay in their rest too.
        return Latencies(times=table[..., :-1], rest=table[..., -1].min(axis=1))

    def choose(self, latencies: Latencies, min_done: int, in_flight: int) -> ThresholdEffect:
        """Choose the threshold, the same in all processes."""
        effect = choose_threshold(
            *latencies,
            max_drop=self._calibration.max_drop,
            candidates=self._calibration.candidates,
            min_done=min_done,
            in_flight=in_flight,
        )
        # Hosts of other kinds may round other sums, and then choose a neighbor.
        first = gathered(np.asarray([effect.threshold], np.float32))[0, 0]
        return dataclasses.replace(effect, threshold=float(first))


def gathered(local: np.ndarray) -> np.ndarray:
    """Return an array of every process, [processes, *shape]."""
    found = np.asarray(multihost_utils.process_allgather(local))
    return found.reshape(jax.process_count(), *local.shape)
