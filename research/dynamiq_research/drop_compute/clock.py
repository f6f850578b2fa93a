"""Clock that shows latencies of a table, to simulate stragglers."""

import dataclasses

import numpy as np

from dynamiq_research.drop_compute.thresholds import Latencies


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared
class SimulatedClock:
    """Clock of `DropCompute` that shows latencies of a table, to simulate stragglers.

    Micro-batches then count as done at the times of the table, whatever they take here. The steps
    of the table repeat.
    """

    latencies: Latencies

    def __post_init__(self):
        if not isinstance(self.latencies, Latencies):
            raise TypeError(
                f"latencies={self.latencies!r:.80} are no Latencies. Give "
                "dynamiq_research.Latencies(times, rest)."
            )

    def check(self, workers: int, micro_batches: int) -> None:
        """Raise ValueError for a table of other numbers of workers or micro-batches."""
        of_table = self.latencies.times.shape[1:]
        if of_table != (workers, micro_batches):
            raise ValueError(
                f"clock has a table of {of_table[0]} workers and {of_table[1]} micro-batches, and "
                f"this step has {workers} and {micro_batches}. Give a table of the same numbers."
            )

    def __call__(self, step: int, worker: int, event: int) -> float:
        """Return the seconds at an event of a worker's step, from the start of the step."""
        row = step % len(self.latencies.times)
        elapsed = np.cumsum(self.latencies.times[row], axis=1)
        if event <= elapsed.shape[1]:
            return float(elapsed[worker, event - 1]) if event else 0.0
        return float(elapsed[:, -1].max() + self.latencies.rest[row])
