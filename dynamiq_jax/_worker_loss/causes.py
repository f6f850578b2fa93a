"""Likely causes of a difference between the loss of workers and of the batch, by experiments.

Each cause is a law that other losses break. An experiment explains a difference if its loss and its
gradient are much closer to the whole batch than the loss and the gradient of the workers.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from dynamiq_jax._worker_loss.on_rows import OnRows, Seen

_CLOSER = 0.02  # share of a difference that an explanation may leave
_MOST = 16  # blocks, or rows of a group, that are tried


class Cause(NamedTuple):
    """Likely cause of a difference."""

    name: str
    remedy: str


class LossDifference:
    """A difference between the workers' loss and the loss of the whole batch, with experiments."""

    def __init__(self, on_rows: OnRows, workers: Seen):
        self.on_rows = on_rows
        self.everything = np.arange(on_rows.count)[None]
        self.whole = on_rows.see(self.everything)
        self.size = self.distance(workers)

    def distance(self, seen: Seen) -> float:
        """Return the relative distance of the first set from the whole batch."""
        scale = np.abs(self.whole.losses[0]) or 1.0
        norm = np.linalg.norm(self.whole.gradients[0]) or 1.0
        of_loss = np.abs(seen.losses[0] - self.whole.losses[0]) / scale
        return float(of_loss + np.linalg.norm(seen.gradients[0] - self.whole.gradients[0]) / norm)

    def explains(self, seen: Seen) -> bool:
        """Return whether an experiment has the loss and the gradient of the whole batch."""
        return self.distance(seen) < _CLOSER * self.size

    def of_units(self, units: np.ndarray) -> bool:
        """Return whether the loss of the batch is the mean over units of rows: [units, rows]."""
        return not self.on_rows.fails(units[0]) and self.explains(self.on_rows.see(units).mean())


def cause_of(difference: LossDifference) -> Cause:
    """Return the likely cause of a difference."""
    rules: tuple[Callable[[LossDifference], Iterator[Cause]], ...] = (
        _empty,
        _random,
        _no_rows,
        _ordered,
        _function_of_means,
        _compared,
    )
    return next(cause for rule in rules for cause in rule(difference))


def cause_of_error(on_rows: OnRows) -> Cause:
    """Return the likely cause of an error that the loss raises for the rows of one worker."""
    for size in _units(on_rows.count):
        groups = np.arange(on_rows.count).reshape(-1, size)
        if on_rows.parts.shape[1] % size and not on_rows.fails(groups[0]):
            return _groups(on_rows, size)
    for number, name in _beside_others(on_rows):
        if not on_rows.fails(on_rows.parts[0], kept=number):
            return _no_row_each(name, "the loss raises no error")
    return Cause(
        "numbers of the whole batch",
        "The loss takes a number of rows for granted, such as that of the whole batch. Compute it "
        "from the shapes of its arguments.",
    )


def _random(difference: LossDifference) -> Iterator[Cause]:
    on_rows = difference.on_rows
    if not difference.explains(on_rows.see(difference.everything, keys=1)):
        yield Cause(
            "random numbers",
            "The loss is another one with another PRNG key, as with dropout, so that workers and "
            "the whole batch cannot be compared. Check it without dropout.",
        )


def _empty(difference: LossDifference) -> Iterator[Cause]:
    seen = difference.on_rows.see(difference.on_rows.parts)
    finite = np.isfinite(seen.losses) & np.isfinite(seen.gradients).all(axis=1)
    finite |= seen.targets == 0  # num_targets leaves such workers out
    if not finite.all():
        yield Cause(
            "a worker without targets",
            f"On the rows of worker {int(np.argmin(finite))} alone, the loss or its gradient is "
            "not finite. Give num_targets=, a function of the arguments of the loss to the number "
            "of its targets: workers without any then take no part.",
        )


def _no_rows(difference: LossDifference) -> Iterator[Cause]:
    on_rows = difference.on_rows
    for number, name in _beside_others(on_rows):
        try:
            seen = on_rows.see(on_rows.parts, kept=number)
        except Exception:  # shapes that do not fit without this split
            continue
        if difference.explains(seen.mean()):
            yield _no_row_each(name, "the loss is that of the batch")


def _ordered(difference: LossDifference) -> Iterator[Cause]:
    """Yield causes of a loss that depends on the order of rows."""
    on_rows, rows = difference.on_rows, difference.everything[0]
    mixed = np.random.default_rng(0).permutation(rows)
    if all(difference.explains(on_rows.see(each[None])) for each in (np.roll(rows, 1), mixed)):
        return
    last, first = rows.copy(), rows.copy()
    last[-1], first[0] = rows[0], rows[-1]
    if any(difference.explains(on_rows.see(each[None])) for each in (last, first)):
        yield Cause(
            "a count of the whole batch",
            "Rows at the start or the end of the batch do not matter, as in x[:4]: the loss takes "
            "a fixed number of rows, and each worker would take as many of its own. Cut the batch "
            "before the loss, or compute the number from the shapes of its arguments.",
        )
    for count in _units(len(rows)):
        if difference.of_units(rows.reshape(count, -1).T):
            yield Cause(
                "rows in blocks",
                f"The batch stacks {count} blocks, and the loss compares rows of one with rows of "
                f'another. Give split="blocks:{count}"{_multiple(on_rows, count)}.',
            )
    for size in _units(len(rows)):
        if difference.of_units(rows.reshape(-1, size)):
            yield _groups(on_rows, size)
    yield Cause(
        "the order of rows",
        "The loss depends on the order of the rows in the batch, and workers have other neighbors. "
        "Give split=, a function that says which rows each worker needs together.",
    )


def _function_of_means(difference: LossDifference) -> Iterator[Cause]:
    """Yield causes of a loss whose gradient is a weighted sum of those of the workers' parts."""
    on_rows, whole = difference.on_rows, difference.whole
    seen = on_rows.see(on_rows.parts)
    other_parts = on_rows.parts.T.reshape(on_rows.parts.shape)
    if _gap(difference, seen, on_rows.see(other_parts)) < 0.01 * difference.size:
        yield Cause(
            "a sum over rows",
            "The loss is a sum over rows, or divides by a number of the whole batch, and not a "
            "mean. Divide by the number of rows, or of targets, that its arguments have.",
        )
    if seen.gradients.shape[1] < 2 * len(seen.losses):
        return  # any gradient is such a sum
    weights, *_ = np.linalg.lstsq(seen.gradients.T, whole.gradients[0], rcond=1e-6)
    mean = seen.mean()
    left, of_workers = (
        np.linalg.norm(gradient - whole.gradients[0])
        for gradient in (weights @ seen.gradients, mean.gradients[0])
    )
    rounding = 1e-2 if on_rows.has_16_bits else 1e-4
    if left > _CLOSER * of_workers + rounding * np.linalg.norm(whole.gradients[0]):
        return
    # Weights of a root of a mean have the loss of the whole batch, too, but not the sum 1. Those of
    # a logarithm have this sum, but leave a difference of the losses.
    size = abs(whole.losses[0]) or 1.0
    of_loss = abs(mean.losses[0] - whole.losses[0]) / size
    error = abs(weights @ seen.losses - whole.losses[0]) / size
    allowed = 0.1 * (of_loss + rounding)
    if abs(weights.sum() - 1) < allowed and error < allowed:
        shares = ", ".join(f"{weight:.3f}" for weight in weights[:8])
        given = "num_targets gives others" if on_rows.work.num_targets else "Give num_targets"
        yield Cause(
            "uneven targets",
            "The loss is the mean over targets, of which workers have different numbers. Their "
            f"shares are {shares}{', ...' if len(weights) > 8 else ''}. {given}: a function of the "
            "arguments to the number of targets that the mean is over.",
        )
    yield Cause(
        "a function of a mean",
        "The loss is not a mean over rows, but a function of one, such as its logarithm, root or "
        "square. The mean over workers of such a loss is another one. Return the mean, and take "
        "the function of the result.",
    )


def _gap(difference: LossDifference, one: Seen, other: Seen) -> float:
    """Return the distance of two sums of losses, each over its own sets of rows."""
    scale = abs(difference.whole.losses[0]) or 1.0
    norm = np.linalg.norm(difference.whole.gradients[0]) or 1.0
    of_loss = abs(one.losses.sum() - other.losses.sum()) / scale
    return float(of_loss + np.linalg.norm(one.gradients.sum(0) - other.gradients.sum(0)) / norm)


def _compared(difference: LossDifference) -> Iterator[Cause]:
    """Yield causes of a loss for which each row depends on all others."""
    on_rows = difference.on_rows
    half = np.arange(on_rows.count // 2)
    once = on_rows.see(half[None])
    twice = on_rows.see(np.concatenate([half, half])[None])
    gap = abs(once.losses - twice.losses)[0] / (abs(difference.whole.losses[0]) or 1.0)
    if gap < _CLOSER * difference.size or gap < 1e-3:
        yield Cause(
            "statistics of the batch",
            "The loss depends on statistics of all rows, as batch normalization in training does, "
            "and each worker has those of its own rows. Normalize over features, or average the "
            "statistics over the workers inside of the loss.",
        )
    yield Cause(
        "rows that are compared with all others",
        "The loss of a row depends on which others are in the batch, as with in-batch negatives, "
        "and each worker has its own rows alone. Gather the rows of all workers in the loss, or "
        "take the loss of each worker's rows as another objective.",
    )


def _beside_others(on_rows: OnRows) -> list[tuple[int, str]]:
    """List the arrays of a batch that has several. Of one array, some part has to be split."""
    names = on_rows.batch_names
    return list(enumerate(names)) if len(names) > 1 else []


def _no_row_each(name: str, seen: str) -> Cause:
    return Cause(
        "an array that is not of the batch",
        f"With all of {name} on every worker, {seen}: it has no row for each example. Give P() for "
        "it in in_specs.",
    )


def _groups(on_rows: OnRows, size: int) -> Cause:
    return Cause(
        "groups that are cut",
        f"The loss compares the rows in groups of {size} neighbors, and workers have "
        f'{on_rows.parts.shape[1]} rows each. Give split="groups:{size}"'
        f"{_multiple(on_rows, size)}.",
    )


def _multiple(on_rows: OnRows, unit: int) -> str:
    step = unit * on_rows.workers
    return f", and a multiple of {step} rows" if on_rows.count % step else ""


def _units(rows: int) -> list[int]:
    return [size for size in range(2, min(_MOST, rows // 2) + 1) if rows % size == 0]
