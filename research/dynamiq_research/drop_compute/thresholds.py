"""Recorded or simulated latencies of micro-batches, and the effect of a threshold on them."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynamiq_jax.parts import check_integer, check_number

Table = NDArray[np.float64]


class Latencies(NamedTuple):
    """Recorded seconds of training steps, for `choose_threshold` and the command."""

    times: Table  # [steps, workers, micro_batches]: of each micro-batch
    rest: Table  # [steps]: from the last worker's last micro-batch to the end of the step


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThresholdEffect:
    """Effect of one compute threshold on a table of latencies."""

    threshold: float  # seconds of accumulation; inf if a worker never stops early
    speedup: float  # micro-batches a second, against no threshold (S_eff of the paper)
    drop_rate: float  # share of micro-batches that were not done
    step_seconds: float  # mean time of a step with the threshold, rest included
    step_seconds_before: float  # and without it


class Replay(NamedTuple):
    """Steps of a table of latencies, as a threshold would have changed them."""

    done: NDArray[np.int64]  # [steps, workers]: micro-batches that each worker completed
    seconds: Table  # [steps]: accumulation of the last worker


def effect_of_threshold(
    times: ArrayLike,
    rest: ArrayLike,
    threshold: float,
    *,
    min_done: int = 1,
    in_flight: int = 0,
    cut: bool = False,
) -> ThresholdEffect:
    """Compute the effect of a compute threshold on a table of latencies, by replaying its steps.

    A worker checks the threshold before it starts a micro-batch, as `DropCompute` does, and
    finishes the ones that it has started. With `cut`, as in the model of the paper, the micro-batch
    that runs at the threshold is cut off, and does not count.

    The speed-up is the ratio of throughputs, in micro-batches a second over all steps. It is
    exactly 1 without a threshold.

    Args:
      times: seconds [steps, workers, micro_batches] without a threshold.
      rest: seconds of a step after the accumulation, a number or [steps].
      threshold: seconds of accumulation after which a worker starts no further micro-batch.
      min_done: micro-batches that every worker does in any case.
      in_flight: micro-batches that are queued on the device behind the one that the check waits
        for; see `DropCompute`.
      cut: cut off the micro-batch that runs at the threshold.

    Raises:
      ValueError: `times` or `rest` have another shape, or hold values that are negative or not
        finite; or an option is not possible.

    >>> import numpy as np
    >>> times = np.ones((1, 2, 4)); times[0, 1] = 2.0  # the second worker is slow
    >>> effect = effect_of_threshold(times, 1.0, 4.0)  # it stops after two of four
    >>> effect.drop_rate, effect.step_seconds_before, effect.step_seconds, effect.speedup
    (0.25, 9.0, 5.0, 1.35)
    """
    check_number("threshold", threshold, 0, float("inf"), "seconds of at least 0, or inf")
    check_integer("min_done", min_done, 1)
    check_integer("in_flight", in_flight, 0)
    elapsed = _elapsed(times)
    replayed = replay(elapsed, threshold, min_done, in_flight, cut)
    return _effect(elapsed, _rest(rest, len(elapsed)), threshold, replayed)


def choose_threshold(
    times: ArrayLike,
    rest: ArrayLike,
    *,
    max_drop: float = 0.1,
    candidates: int = 200,
    min_done: int = 1,
    in_flight: int = 0,
) -> ThresholdEffect:
    """Choose the compute threshold with the highest throughput on a table of latencies.

    Candidates lie evenly between the fastest worker's time for half of its micro-batches and the
    longest accumulation of all, beside "no threshold". That is chosen if nothing is faster, and for
    a single worker, for which nobody waits. The same table gives the same threshold.

    Args:
      times: seconds [steps, workers, micro_batches] without a threshold, of all workers.
      rest: seconds of a step after the accumulation, a number or [steps].
      max_drop: share of micro-batches that may be dropped. The paper (arXiv 2306.10598) reports no
        loss of accuracy up to 10%.
      candidates: number of thresholds to try.
      min_done: see `effect_of_threshold`.
      in_flight: see `effect_of_threshold`.

    Raises:
      ValueError: as `effect_of_threshold`.
    """
    check_number("max_drop", max_drop, 0, 1)
    for name, value, low in (
        ("candidates", candidates, 2),
        ("min_done", min_done, 1),
        ("in_flight", in_flight, 0),
    ):
        check_integer(name, value, low)
    elapsed = _elapsed(times)
    seconds = _rest(rest, len(elapsed))
    first = elapsed[..., (elapsed.shape[-1] + 1) // 2 - 1].min()
    best = _effect(elapsed, seconds, np.inf, replay(elapsed, np.inf, min_done, in_flight))
    if elapsed.shape[1] == 1:
        return best
    for threshold in np.linspace(first, elapsed.max(), candidates).tolist():
        replayed = replay(elapsed, threshold, min_done, in_flight)
        effect = _effect(elapsed, seconds, threshold, replayed)
        if effect.drop_rate <= max_drop and effect.speedup > best.speedup:
            best = effect
    return best


def replay(
    elapsed: Table, threshold: float, min_done: int, in_flight: int, cut: bool = False
) -> Replay:
    """Replay steps under a threshold; see `effect_of_threshold`.

    Args:
      elapsed: seconds [steps, workers, micro_batches] from the start of the accumulation.
      threshold: as there.
      min_done: as there.
      in_flight: as there.
      cut: as there.
    """
    below = (elapsed < threshold).sum(axis=-1)
    if cut:
        return Replay(below, np.minimum(elapsed[..., -1], threshold).max(axis=-1))
    started = np.maximum(below + 1 + in_flight, min_done)
    done = np.minimum(started, elapsed.shape[-1])
    return Replay(done, np.take_along_axis(elapsed, done[..., None] - 1, axis=-1).max(axis=(1, 2)))


def _effect(elapsed: Table, rest: Table, threshold: float, replayed: Replay) -> ThresholdEffect:
    before = float((elapsed[..., -1].max(axis=-1) + rest).mean())
    after = float((replayed.seconds + rest).mean())
    kept = float(replayed.done.mean()) / elapsed.shape[-1]
    return ThresholdEffect(
        threshold=float(threshold),
        speedup=kept * (before / after),
        drop_rate=1 - kept,
        step_seconds=after,
        step_seconds_before=before,
    )


def _elapsed(times: ArrayLike) -> Table:
    """Return seconds from the start of a step until each micro-batch is done."""
    table = _finite("times", times)
    if table.ndim != 3 or table.size == 0 or not (table.sum(axis=-1) > 0).all():
        raise ValueError(
            f"times has shape {table.shape}, or workers that take no time. Give seconds as an "
            "array [steps, workers, micro_batches]."
        )
    return np.cumsum(table, axis=-1)


def _rest(rest: ArrayLike, steps: int) -> Table:
    seconds = _finite("rest", rest)
    if seconds.shape not in ((), (steps,)):
        raise ValueError(
            f"rest has shape {seconds.shape}, but there are {steps} steps. Give a number of "
            "seconds, or one for each step."
        )
    return np.broadcast_to(seconds, (steps,))


def _finite(name: str, values: Any) -> Table:
    table = np.asarray(values, np.float64)
    if not (np.isfinite(table) & (table >= 0)).all():
        wrong = table[~(np.isfinite(table) & (table >= 0))].flat[0]
        raise ValueError(f"{name} holds {wrong}. Give finite seconds of at least 0.")
    return table
