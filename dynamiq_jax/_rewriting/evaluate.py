"""Evaluation of a scheduled program, while JAX traces it anew."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._rewriting import unreduced
from dynamiq_jax._rewriting.nodes import Constant, Value
from dynamiq_jax._rewriting.steps import Compute, EvaluationSchedule, Messages, Reduce
from dynamiq_jax._rewriting.unreduced import Metrics
from dynamiq_jax._run.driver import run
from dynamiq_jax._run.sample import SampledKey
from dynamiq_jax._run.unreduced import is_unreduced, reduce_unreduced
from pallas_kernels._jax import compat

# Behind these, sums over rows wait for the same messages as before.
_KEEPING = ("none", "of rows")


def evaluate(
    schedule: EvaluationSchedule,
    request: Request,
    key: Array | None,
    *values: Any,
    metrics: list[Metrics] | None = None,
) -> list[Any]:
    """Evaluate a program for some inputs.

    Args:
      schedule: schedule of the program.
      request: how to compress.
      key: PRNG key for all sums, the same on all workers; None: from a sample of each group.
      *values: inputs of the program.
      metrics: list to which the metrics of its groups are added, but for those inside.
    """
    known: dict[Value, Any] = dict(schedule.constants)
    known.update(zip(schedule.inputs, values, strict=True))

    def read(each: Value) -> Any:
        return each.value if isinstance(each, Constant) else known[each]

    results: Sequence[Any]
    # Sums over rows wait for all messages but those of each other, which are as in the program: to
    # delay statistics of a batch would copy its activations.
    behind = order.last_token()
    for step in schedule.steps:
        match step:
            case Compute():
                function = step.function
                if step.programs:
                    bodies = [
                        functools.partial(evaluate, inside, request) for inside in step.programs
                    ]
                    function = functools.partial(function, bodies, key)
                inputs = list(map(read, step.inputs))
                results = _in_order(function, inputs, step.messages, behind)
                known.update(zip(step.outputs, results, strict=True))
                if step.programs or step.messages not in _KEEPING:
                    behind = order.last_token()
            case Reduce():
                operands = [read(each.operand) for each in step.members]
                results, found = _reduce(step, request, operands, key)
                if metrics is not None:
                    metrics.append(found)
                known.update(zip((e.result for e in step.members), results, strict=True))
                behind = order.last_token()
    return [read(each) for each in schedule.outputs]


def _reduce(
    group: Reduce, request: Request, operands: Sequence[Any], key: Array | None
) -> tuple[list[Any], Metrics]:
    """Reduce the operands of a group in one compressed collective, and return its metrics."""
    tree = group.by_path(operands)
    if further := tuple(name for name in group.axes if name not in group.over):
        exactly = _in_order(lambda *terms: lax.psum(terms, further), list(tree.values()))
        tree = group.by_path(exactly)

    def compressed(tree: dict[str, Any]) -> tuple[dict[str, Any], Metrics]:
        collective = group.collective(find_axes(group.over))
        of_group: Any = jax.random.fold_in(jax.random.key(0) if key is None else key, group.number)
        if key is None or group.around.times != 1:  # in a loop, a key is the same in all turns
            of_group = SampledKey(of_group)
        outcome = run(collective, tree, of_group, request.with_specs(group.specs(request)))
        return outcome.tree, outcome.metrics

    results = group.by_path(each.result.var for each in group.members)
    if group.workers is not None:
        parts = group.by_path(each.part for each in group.members)
        totals, metrics = unreduced.reduced(compressed, tree, results, group.workers, parts)
        placed = group.by_path(each.placed for each in group.members)
        totals = {
            name: unreduced.placed(total, placed[name], group.workers)
            for name, total in totals.items()
        }
    elif is_unreduced(tree):  # outside of a map, on explicit axes
        totals, metrics = reduce_unreduced(compressed, tree, group.over)
        shardings = group.by_path([each.params["dst_sharding"] for each in group.members])
        totals = jax.sharding.reshard(totals, shardings)
    else:
        totals, metrics = compressed(tree)
    # JAX lets a gather vary over its axis, say, where ours is known to be the same on all workers.
    alike = (compat.match_varying(total, results[name].aval) for name, total in totals.items())
    return list(alike), metrics


def _in_order(
    function: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    messages: Messages = "once",
    behind: Array | None = None,
) -> Sequence[Any]:
    """Call a function that sends messages, in front of the next collective of the trace.

    Sums over rows wait for the token `behind`, others for the last collective of the trace.
    """
    last = order.last_token()
    match messages:
        case "none":
            return function(*values)
        case "of rows" | "once":
            token = behind if messages == "of rows" else last
            values = tuple(_after(token, value) for value in values)
        case "in a loop":
            values = _one_after(last, values)
    results = function(*values)
    order.remember(order.token_of([last, *results]))
    return results


def _one_after(token: Array | None, values: Sequence[Any]) -> list[Any]:
    """Delay the smallest value that can be delayed: a loop begins when all of them are there."""
    delayed = list(values)
    for i in sorted(range(len(delayed)), key=lambda i: np.size(delayed[i])):
        delayed[i] = _after(token, values[i])
        if delayed[i] is not values[i]:
            break
    return delayed


def _after(token: Array | None, value: Any) -> Any:
    return order.after(token, value) if isinstance(value, Array) else value  # or a number
