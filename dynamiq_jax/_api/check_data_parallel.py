"""A first check: the loss of the workers is that of the whole batch."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dynamiq_jax._core import check_number
from dynamiq_jax._inputs.shards import on_automatic_axes
from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.aux import ROLES, ROWS, roles_of
from dynamiq_jax._worker_loss.causes import LossDifference, cause_of, cause_of_error
from dynamiq_jax._worker_loss.gradients import exact_value_and_leaves
from dynamiq_jax._worker_loss.loss_call import LossCall, plan_call
from dynamiq_jax._worker_loss.on_rows import OnRows, Result, Seen, on_host
from dynamiq_jax._worker_loss.wrapped import loss_of

_OF_32_BITS, _OF_16_BITS = 1e-3, 0.03  # relative differences that rounding causes
# A loss of terms that cancel, as the first one of GRPO, is all rounding.
_ROUNDING = 1e-6


def check_data_parallel(
    wrapped: Callable[..., Any], *args: Any, tolerance: float | None = None, **kwargs: Any
) -> None:
    """Check on one batch that the loss of the workers is that of the whole batch.

        mean_loss = dq.data_parallel(loss_fn, mesh=mesh, axis_name="data")
        dq.check_data_parallel(mean_loss, params, batch)

    The wrapped loss without compression is compared with the loss function on the whole batch, by
    value, gradients, and aux with its roles. A loss that compares rows, depends on their order, or
    is no mean has another value on the parts of the workers, without an error. If there is a
    difference, experiments with the loss on chosen rows find a likely cause:

    - *rows in blocks*, *groups that are cut*, *the order of rows*: rows that belong together are on
      different workers;
    - *a count of the whole batch*, *numbers of the whole batch*: as in `x[:4]`;
    - *an array that is not of the batch* is split, such as weights of classes;
    - *a sum over rows*, *a function of a mean*: the loss is no mean;
    - *uneven targets* without `num_targets`, or *a worker without targets*;
    - *statistics of the batch*, as of batch normalization, or *rows that are compared with all
      others*, as in-batch negatives;
    - *random numbers*: the check is not possible.

    The batch may be small: a few rows for each worker are enough, of different values, with padding
    as in training. Without a difference, the check costs two gradients. Modules of nnx are copied,
    and nothing is dropped in the copies. Every process of a job has to call the check.

    Args:
      wrapped: result of `data_parallel` or `value_and_grad`.
      *args: arguments of the loss function.
      tolerance: relative difference that rounding may cause, in the loss, the norm of all gradients
        and each array of aux. None for 0.001, or 0.03 if the loss computes in 16 bits. Values of
        the loss and of aux may also differ by 1e-6, since their terms may cancel.
      **kwargs: keyword arguments of the loss function.

    Raises:
      TypeError: `wrapped` is no such result.
      ValueError: there is a difference, and the text names a likely cause and a remedy; the loss of
        the whole batch is not finite; or arguments are not possible.
    """
    work = loss_of(wrapped)
    if work is None:
        raise TypeError(
            f"wrapped={wrapped!r:.80} is not a result of dq.data_parallel or dq.value_and_grad. "
            "Give one, without another function around it."
        )
    if tolerance is not None:
        check_number("tolerance", tolerance, 0, 1)
    copies = jax.tree.map(modules.without_dropout, (args, kwargs), is_leaf=modules.is_module)
    call = plan_call(work, *copies)
    leaves, structure = jax.tree.flatten(call.arrays)
    # The loss alone, on rows of the batch, is a program without explicit axes, as in training.
    with on_automatic_axes(work.mesh, leaves) as placed:
        _check(call._replace(arrays=jax.tree.unflatten(structure, placed)), tolerance)


def _check(call: LossCall, tolerance: float | None) -> None:
    work, on_rows = call.plan.work, OnRows(call)
    whole = on_rows.whole
    if tolerance is None:
        tolerance = _OF_16_BITS if on_rows.has_16_bits else _OF_32_BITS
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in (whole.loss, *whole.gradient)):
        raise ValueError(
            f"The loss of the whole batch is {float(whole.loss)}, and it or its gradient is not "
            "finite. Give a batch and parameters for which it is."
        )
    try:
        value, gradient = exact_value_and_leaves(call)
    except Exception as error:
        if not (on_rows.count and (text := on_rows.fails(on_rows.parts[0]))):
            raise
        cause = cause_of_error(on_rows)
        raise ValueError(
            f"The loss raises an error for the {on_rows.parts.shape[1]} rows of one worker, and "
            f"none for the whole batch. {text.rstrip('.')}. Likely cause: {cause.name}. "
            f"{cause.remedy}"
        ) from error
    loss, aux = value if work.has_aux else (value, None)
    _compare(on_rows, float(loss), gradient, tolerance)
    if work.has_aux:
        _compare_aux(on_rows, aux, tolerance)


def _compare(on_rows: OnRows, loss: float, gradient: list[Any], tolerance: float) -> None:
    """Raise ValueError if the loss or the gradient differs from the whole batch."""
    whole = on_rows.whole
    expected = float(whole.loss)
    of_gradient = _distance(gradient, whole)
    if _is_close(loss, expected, tolerance) and of_gradient <= tolerance:
        return
    text = (
        f"The loss of {on_rows.workers} workers is {loss:.7g}, and {expected:.7g} for the whole "
        f"batch. Their gradients differ by {of_gradient:.2%}."
    )
    if not on_rows.count:
        raise ValueError(
            f"{text} Arrays of the batch have different numbers of rows, so that no cause was "
            "looked for."
        )
    coordinates = on_host(on_rows.coordinates(gradient))
    workers = Seen(np.array([loss]), coordinates[None], np.ones(1))
    cause = cause_of(LossDifference(on_rows, workers))
    raise ValueError(f"{text} Likely cause: {cause.name}. {cause.remedy}")


def _distance(gradient: list[Any], whole: Result) -> float:
    """Return the relative distance of a gradient from the gradient of the whole batch."""
    pairs = list(zip(gradient, whole.gradient, strict=True))
    squares = [_square(a - b) for a, b in pairs]
    norms = [_square(b) for _, b in pairs]
    return float(np.sqrt(sum(squares) / (sum(norms) or 1.0)))


def _square(leaf: Array) -> float:
    """Return the sum of the squares of magnitudes."""
    return float(jnp.sum(jnp.abs(leaf).astype(jnp.float32) ** 2))


def _compare_aux(on_rows: OnRows, aux: Any, tolerance: float) -> None:
    """Raise ValueError for an array of aux that differs from the whole batch."""
    roles = roles_of(on_rows.work.aux, aux)
    expected = jax.tree.leaves(on_rows.whole.aux)
    for number, (path, leaf) in enumerate(jax.tree.leaves_with_path(aux)):
        if _is_close(leaf, expected[number], tolerance):
            continue
        name, role = f"aux{jax.tree_util.keystr(path)}", roles[number]
        fitting = [
            other
            for other, value in (_by_role(on_rows, number) if on_rows.count else {}).items()
            if _is_close(value, expected[number], tolerance)
        ]
        remedy = (
            f"Likely cause: the role. It is {ROLES[fitting[0]]}: give the role {fitting[0]!r}."
            if fitting
            else "No role has the value of the whole batch. Return sums and counts, and make "
            "other functions of the results."
        )
        shown = _shown(leaf), _shown(expected[number])
        raise ValueError(
            f"{name} with the role {role!r} is {shown[0]}, and {shown[1]} for the whole batch. "
            f"{remedy}"
        )


def _by_role(on_rows: OnRows, number: int) -> Mapping[str, Any]:
    """Return the values that an array of aux would have, by role."""
    parts, targets = on_rows.aux_of(on_rows.parts)
    each = on_host(jax.tree.leaves(parts)[number])
    rows = np.concatenate(each) if each.ndim > 1 else each
    if len(rows) == on_rows.count:
        rows = rows[np.argsort(on_rows.parts.ravel())]
    mean = np.tensordot(targets / targets.sum(), each, 1)
    return {"mean": mean, "sum": each.sum(0), "same": each[0], ROWS: rows}


def _is_close(found: Any, expected: Any, tolerance: float) -> bool:
    found, expected = on_host(found), on_host(expected)
    if found.shape != expected.shape:
        return False
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=0) or 1.0
    allowed = tolerance * scale + _ROUNDING
    return bool(np.allclose(found, expected, rtol=0, atol=allowed, equal_nan=True))


def _shown(leaf: Any) -> str:
    is_scalar = np.ndim(leaf) == 0
    return f"{on_host(leaf).item():.7g}" if is_scalar else f"an array of shape {np.shape(leaf)}"
