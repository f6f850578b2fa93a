"""The all-reduce as an optax transformation."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from dynamiq_jax._buckets.axes import AxisName, find_axes
from dynamiq_jax._check.check import check_plan
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._core.validation import check_integer, check_seed, is_integer, is_whole_array
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import resolve
from dynamiq_jax._inputs.schedule import Schedule
from dynamiq_jax._plan.plan import plan_tree
from dynamiq_jax._run.driver import run_plan
from dynamiq_jax._states.states import all_names, check_state_names, check_type, first_states


class AllReduceState(NamedTuple):
    """State of `all_reduce_gradients`: a plain pytree.

    Each array of `method` has a leading axis of size 1, the worker. Between calls of
    `jax.shard_map`, states of all workers lie side by side along this axis, for every method:

        specs = dq.AllReduceState(step=P(), method=P("data"), metrics=P())

    With `specs` of the gradients, the states of a worker's shards lie side by side too, split over
    the axes that split the gradients.

    Beside the states is a record of their worker, under the name "worker". With
    `method=P()` under `check_vma=False`, a checkpoint would hold the states of one worker for all.
    If any worker has states of another worker, all workers go on from first states, and
    `metrics["reset_states"]` is the share of workers with foreign states.
    """

    step: Array  # int32 scalar: steps taken, which with the seed make the key of a step
    # States of methods, of the buckets whose method carries one; with a schedule, of all phases. A
    # key names a state by its kind, its leaves, and a hash of the kind and the leaves. Beside
    # states, "worker" has the index of the worker and the number of workers, int32 [1, 2].
    method: Mapping[str, Any]
    metrics: Mapping[str, Array] = {}  # of the last step, float32 scalars; {} without metrics


def all_reduce_gradients(
    axis_name: AxisName,
    method: Choice | Schedule = Compression(),
    *,
    seed: int = 0,
    start_step: int = 0,
    with_metrics: bool = False,
    phase: int | None = None,
) -> optax.GradientTransformation:
    """Average gradients over a mesh axis, compressed on the wire. Put it first in `optax.chain`.

        optimizer = optax.chain(dq.all_reduce_gradients("data"), optax.adamw(1e-3))

    `update` must run inside `jax.shard_map` (or `jax.vmap`) with the axis; so must `init` for a
    method that carries state. `update` takes the local gradients of each worker, and returns their
    mean, the same on all workers.

    Args:
      axis_name: one axis, or several with the slowest link first; see `psum`.
      method: compression method or policy; see `psum`. Or a `Schedule` of several methods. One
        program then holds all methods and the states of all phases, and chooses by the step. Two
        phases share the state of a bucket of the same leaves, if the states are of one kind: error
        feedback goes on through a switch.
      seed: seed of the rounding noise, the same on all workers.
      start_step: step that the first update counts as.
      with_metrics: whether the metrics in the state include the metrics of `psum`, which any method
        has.
      phase: the phase of a schedule for all steps of this program; None to choose by the step. The
        compiler runs no transfer of a choice at run time under a backward pass. For an overlap,
        compile one program for each phase, and call the program of `schedule.phase(step)`. The
        states of all programs are alike.

    Returns:
      A transformation whose state holds the step, the states of methods and metrics. The state can
      be saved and restored like any pytree.

    Raises:
      ValueError: as `psum`; a seed or a step that is no integer; a phase that the schedule does not
        have; in `update`, a state of other leaves or of another kind of method.
    """
    check_seed(seed)
    if not is_whole_array(start_step):
        check_integer("start_step", start_step, 0, 2**31 - 1)
    schedule = method if isinstance(method, Schedule) else Schedule({0: method})
    if phase is not None and not (is_integer(phase) and 0 <= phase < len(schedule.phases)):
        raise ValueError(
            f"phase={phase!r} is not one of the {len(schedule.phases)} of method={method!r:.200}. "
            "Give schedule.phase(step), or None."
        )
    phases = tuple(schedule.phases)
    settings = {"seed": seed, "start_step": start_step, "phases": phases, "phase": phase}
    requests = [
        resolve(each, measures=with_metrics, settings=settings) for each in schedule.methods
    ]

    def no_metrics(tree: Any) -> dict[str, Array]:
        names = [each.metrics(each.compression.policy.used(tree)) for each in requests]
        return {name: jnp.zeros((), jnp.float32) for name in itertools.chain(*names)}

    def init(params: Any) -> AllReduceState:
        states: dict[str, Any] = {}
        for request in requests:
            if request.is_stateful(params):
                plan, _ = plan_tree(_mean(axis_name), params, request)
                check_plan(plan)
                states |= first_states(plan)
        return AllReduceState(jnp.asarray(start_step, jnp.int32), states, no_metrics(params))

    def update(
        updates: Any, state: AllReduceState, params: Any = None
    ) -> tuple[Any, AllReduceState]:
        del params
        check_type(state, AllReduceState)
        planned = [plan_tree(_mean(axis_name), updates, each) for each in requests]
        own = [all_names(plan) for plan, _ in planned]
        check_state_names(state.method, itertools.chain(*own))

        def run(number: int) -> tuple[Any, dict[str, Any], dict[str, Array]]:
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            own_states = {name: state.method[name] for name in own[number]}
            outcome = run_plan(*planned[number], key, own_states)
            others = {name: each for name, each in state.method.items() if name not in own_states}
            if others and (foreign := outcome.foreign) is not None:
                # The record of the worker is about these, too: all begin anew together.
                first = {
                    name: each for plan, _ in planned for name, each in first_states(plan).items()
                }
                others = jax.tree.map(
                    lambda new, old: jnp.where(foreign > 0, new, old),
                    {name: first[name] for name in others},
                    others,
                )
            states = {**others, **outcome.states}
            return outcome.tree, states, {**no_metrics(updates), **outcome.metrics}

        if phase is not None or len(requests) == 1:
            tree, states, metrics = run(phase or 0)
        else:
            branches = [functools.partial(run, number) for number in range(len(requests))]
            tree, states, metrics = lax.switch(schedule.traced_phase(state.step), branches)
        return tree, AllReduceState(state.step + 1, states, metrics)

    return optax.GradientTransformation(init, update)


def _mean(axis_name: AxisName) -> AllReduce:
    return AllReduce(find_axes(axis_name), mean=True)
