"""Choice of a compute threshold from the latencies that all processes recorded."""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils

from dynamiq_jax.parts import check_integer, check_number
from dynamiq_research.drop_compute.thresholds import (
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
    """Latencies that the workers of this process record until a threshold is chosen from them."""

    def __init__(self) -> None:
        self._steps: list[Table] = []
        # Of all workers, from which the last threshold was chosen; None if none was yet.
        self.latencies: Latencies | None = None
        self.effect: ThresholdEffect | None = None  # of that threshold on them

    def check(self, micro_batches: int) -> None:
        """Raise ValueError for another number of micro-batches than in the steps before."""
        before = self._steps[0].shape[1] - 1 if self._steps else micro_batches
        if micro_batches != before:
            raise ValueError(
                f"micro_batches has length {micro_batches}, and {before} in the steps before. Give "
                "as many in every step until a threshold is chosen."
            )

    def add(self, times: Table, rest: Table) -> int:
        """Add a step: seconds [workers, micro_batches], and [workers] of the rest of the step.

        Returns:
          The number of steps that are there.
        """
        self._steps.append(np.concatenate([times, rest[:, None]], axis=1))
        return len(self._steps)

    def choose(self, calibration: Calibration, min_done: int, in_flight: int) -> ThresholdEffect:
        """Choose a threshold from the steps of all processes, the same in all, and start again.

        Every process has to call this at the same step.

        Raises:
          ValueError: processes have other numbers of workers or of micro-batches.
        """
        own, self._steps = np.stack(self._steps[calibration.skip :]), []
        self.latencies = _of_all_processes(own)
        effect = choose_threshold(
            *self.latencies,
            max_drop=calibration.max_drop,
            candidates=calibration.candidates,
            min_done=min_done,
            in_flight=in_flight,
        )
        # Hosts of other kinds may round other sums, and then choose a neighbor.
        first = gathered(np.asarray([effect.threshold], np.float32))[0, 0]
        self.effect = dataclasses.replace(effect, threshold=float(first))
        return self.effect


def _of_all_processes(own: Table) -> Latencies:
    """Join the recorded steps of all processes, [steps, workers, micro_batches + 1]."""
    shapes = gathered(np.asarray(own.shape))
    if (shapes != shapes[0]).any():
        raise ValueError(
            "Processes have other numbers of steps, workers or micro_batches: "
            f"{[tuple((s - (0, 0, 1)).tolist()) for s in shapes]}. Give the same to each."
        )
    table = np.concatenate(list(gathered(own.astype(np.float32)).astype(np.float64)), axis=1)
    # The last worker to stop waits for nobody: all others see its delay in their rest too.
    return Latencies(times=table[..., :-1], rest=table[..., -1].min(axis=1))


def gathered(local: np.ndarray) -> np.ndarray:
    """Return an array of every process, [processes, *shape]."""
    of_all = np.asarray(multihost_utils.process_allgather(local))
    return of_all.reshape(jax.process_count(), *local.shape)
