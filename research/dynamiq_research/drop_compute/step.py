"""Train step whose gradient accumulation stops at a compute threshold (DropCompute)."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import dynamiq_jax as dq
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.parts import check_integer, check_number
from dynamiq_research.drop_compute.accumulation import (
    Accumulated,
    Accumulation,
    Clock,
    Sums,
    sum_dtype,
    wall_clock,
)
from dynamiq_research.drop_compute.calibration import Calibration, Recorder
from dynamiq_research.drop_compute.thresholds import Latencies, ThresholdEffect
from dynamiq_research.drop_compute.workers import Workers

P = PartitionSpec
# Methods by the path of a leaf, or a function of the path and the leaf; see `dq.psum`.
Policy = Mapping[str, Method | str] | Callable[[str, Any], Method | str]
_UNKNOWN = -1.0  # a threshold that is not chosen yet; NaN would differ from that of other processes


class DropComputeState(NamedTuple):
    """State of a run with `DropCompute`: a plain pytree that can be saved and restored."""

    params: Any  # replicated over the mesh
    optimizer: optax.OptState
    all_reduce: dq.AllReduceState  # its step counts all steps
    threshold: Array  # float32 scalar, seconds; -1 until it is chosen, inf for no threshold


class DropComputeMetrics(NamedTuple):
    """Metrics of one step, the same on all workers."""

    loss: Array  # float32 scalar: weighted mean over the micro-batches that were done
    done: Array  # int32 scalar: micro-batches that all workers did
    drop_rate: Array  # float32 scalar: share of micro-batches that were not done
    weight: Array  # float32 scalar: sum of weights; 0 if the step was skipped


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # holds compiled programs
class DropCompute:
    """Train step in which a worker stops its gradient accumulation at a compute threshold.

        drop_compute = DropCompute(
            loss_fn=loss_fn, optimizer=optax.adamw(1e-3), mesh=mesh, axis_name="data"
        )
        state = drop_compute.init(params)
        for micro_batches in batches:
            metrics, state = drop_compute.step(micro_batches, state)

    Each worker accumulates gradients of its micro-batches in programs that do not communicate, and
    goes to the all-reduce after the last one, or when the threshold has passed. The sums of all
    workers are divided by the number of all micro-batches that were done (or by the sum of their
    weights): the result is the mean over these, with the error of the compression method.

    A worker checks its clock before it starts a micro-batch, and finishes those that it has
    started. So a step lasts longer than the threshold, and a micro-batch that hangs holds up all
    workers.

    A worker is all devices of a process, which do the same number of micro-batches, or
    `devices_per_worker` of them. Every device holds whole parameters: axes that split them are not
    supported.

    In the first steps there is no threshold. Workers record latencies, share them once, and choose
    the threshold with the highest throughput, the same for all. It is part of the state.

    The method is DropCompute (arXiv 2306.10598).
    """

    loss_fn: Callable[[Any, Any], Array]  # (params, micro_batch) to a mean over its rows, a scalar
    optimizer: optax.GradientTransformation
    mesh: Mesh
    axis_name: str | tuple[str, ...]  # all axes of the mesh, the slowest link first
    # Of the all-reduce; also one with state.
    method: Method | str | Policy | dq.Compression = DynamiQ()
    seed: int = 0  # of the rounding noise, the same in all processes
    # (params, micro_batch) to the number of targets that the loss is a mean over, a scalar: the
    # weight of a gradient. Without it, all have weight 1.
    num_targets: Callable[[Any, Any], Array] | None = None
    threshold: float | Calibration = Calibration()  # seconds, or how to choose them
    min_done: int = 1  # micro-batches that every worker does in every step
    # Micro-batches that are queued on the device behind the one that the clock waits for. They hide
    # the time between two programs, but are done after the threshold has passed.
    in_flight: int = 0
    devices_per_worker: int | None = None  # None for all devices of a process
    clock: Clock = wall_clock
    # What this process has recorded for a calibration. It is no part of the state.
    recorder: Recorder = dataclasses.field(
        default_factory=Recorder, init=False, repr=False, compare=False
    )

    def __post_init__(self):
        check_integer("min_done", self.min_done, 1)
        check_integer("in_flight", self.in_flight, 0)
        if not isinstance(self.threshold, Calibration):
            check_number("threshold", self.threshold, 0, math.inf, "seconds, or a Calibration")
        _ = self._workers  # checks mesh, axis_name and devices_per_worker
        _ = self._all_reduce  # checks method, topology, seed and options

    @property
    def latencies(self) -> Latencies | None:
        """Latencies of all workers that the threshold was chosen from, if it was in this run."""
        return self.recorder.latencies

    @property
    def effect(self) -> ThresholdEffect | None:
        """Threshold that was chosen in this run, and its effect on the recorded latencies."""
        return self.recorder.effect

    @property
    def state_specs(self) -> DropComputeState:
        """Specs of the state over the axes of the mesh."""
        same: Any = P()
        method: Any = self._workers.rows_spec
        all_reduce = dq.AllReduceState(step=same, method=method, metrics=same)
        return DropComputeState(same, same, all_reduce=all_reduce, threshold=same)

    def wire_report(self, params: Any) -> dq.reports.WireReport:
        """Report the bytes of one step; see `dq.wire_report`.

        Args:
          params: tree of arrays, or of anything with `shape` and `dtype`.
        """
        sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sum_dtype(leaf)), params)
        return dq.wire_report(
            sums, tuple(self.mesh.shape[name] for name in self._workers.names), method=self.method
        )

    def init(self, params: Any) -> DropComputeState:
        """Return the state before the first step, replicated over the mesh; it owns its arrays.

        Args:
          params: pytree of floating arrays, the same in all processes.

        Raises:
          ValueError: a leaf is not floating.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, which "
                    "has no gradient. Give floating parameters, and others inside loss_fn."
                )
        starting = _UNKNOWN if isinstance(self.threshold, Calibration) else self.threshold
        return self._init(*self._replicated((params, np.float32(starting))))

    def step(
        self, micro_batches: Sequence[Any], state: DropComputeState
    ) -> tuple[DropComputeMetrics, DropComputeState]:
        """Take one step. Waits until `state` is ready, so that the clock starts with the step.

        Args:
          micro_batches: pytrees of arrays [rows, ...] with the rows of this process, as many for
            each of its devices. Scalars go whole to each device. The sequence may load lazily: a
            worker indexes a micro-batch just before it starts it, and its time counts.
          state: of `init` or of the step before; its buffers are donated.

        Returns:
          The metrics of the step, and the next state. If all weights are 0, parameters and the
          state of the optimizer stay as they are.

        Raises:
          ValueError: no micro-batches; rows that cannot be shared out; or, until a threshold is
            chosen, another number of micro-batches than before or in another process.
        """
        if not len(micro_batches):
            raise ValueError("micro_batches is empty. Give at least one.")
        if check := getattr(self.clock, "check", None):
            check(self.mesh.size // self._workers.size, len(micro_batches))
        jax.block_until_ready(state)
        number, threshold = int(state.all_reduce.step), float(state.threshold)
        self._check_threshold(threshold)
        calibrating = threshold == _UNKNOWN
        if calibrating:
            self.recorder.check(len(micro_batches))  # before the state is donated
        limit = math.inf if calibrating else threshold
        accumulated = self._accumulation.run(state.params, micro_batches, limit, number)
        metrics, state = self._apply(accumulated.sums, np.int32(len(micro_batches)), state)
        if isinstance(self.threshold, Calibration) and calibrating:
            jax.block_until_ready(state)
            if effect := self._record(accumulated, number, self.threshold):
                chosen = np.float32(effect.threshold)
                state = state._replace(threshold=self._replicated(chosen))
        return metrics, state

    def _check_threshold(self, given: float) -> None:
        """Raise ValueError for a state that was made with another threshold."""
        if isinstance(self.threshold, Calibration) or given == np.float32(self.threshold):
            return
        of_state = "none yet, which a calibration would choose" if given == _UNKNOWN else given
        raise ValueError(
            f"threshold={self.threshold!r}, but the threshold in the state is {of_state}. Replace "
            "it: state._replace(threshold=np.float32(...)), or give the Calibration of before."
        )

    def _record(
        self, accumulated: Accumulated, number: int, calibration: Calibration
    ) -> ThresholdEffect | None:
        """Record a step that has ended; return the threshold if one can be chosen."""
        elapsed = accumulated.elapsed
        ends = [
            self.clock(number, self._workers.first + worker, elapsed.shape[1] + 1) - start
            for worker, start in enumerate(accumulated.starts)
        ]
        times = np.diff(elapsed, axis=1, prepend=0)
        recorded = self.recorder.add(times, np.asarray(ends) - elapsed[:, -1])
        if recorded < calibration.skip + calibration.steps:
            return None
        return self.recorder.choose(calibration, self.min_done, self.in_flight)

    def _replicated(self, tree: Any) -> Any:
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    @functools.cached_property
    def _workers(self) -> Workers:
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        return Workers(self.mesh, names, self.devices_per_worker)

    @functools.cached_property
    def _accumulation(self) -> Accumulation:
        return Accumulation(
            loss_fn=self.loss_fn,
            num_targets=self.num_targets,
            workers=self._workers,
            min_done=self.min_done,
            in_flight=self.in_flight,
            clock=self.clock,
        )

    @functools.cached_property
    def _all_reduce(self) -> optax.GradientTransformation:
        return dq.all_reduce_gradients(self.axis_name, method=self.method, seed=self.seed)

    @functools.cached_property
    def _init(self) -> Callable[..., DropComputeState]:
        def local(params: Any, threshold: Array) -> DropComputeState:
            own = jax.tree.map(jnp.copy, params)  # the user's are not donated
            return DropComputeState(
                own, self.optimizer.init(own), self._all_reduce.init(own), threshold
            )

        return self._mapped(local, (P(), P()), self.state_specs)

    @functools.cached_property
    def _apply(self) -> Callable[..., tuple[DropComputeMetrics, DropComputeState]]:
        """The only program of all devices: the all-reduce and the optimizer."""
        names, devices = self._workers.names, self.mesh.size

        def local(
            sums: Sums, given: Array, state: DropComputeState
        ) -> tuple[DropComputeMetrics, DropComputeState]:
            own = jax.tree.map(lambda leaf: leaf[0], sums)
            weight, loss, done = (lax.psum(x, names) for x in (own.weight, own.loss, own.done))
            # The mean over workers of these is the mean over micro-batches. Their scale does not
            # depend on how many were done, which methods with a state rely on.
            share = jnp.where(weight == 0, 0, devices / weight)
            grads = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), own.gradient)
            grads, all_reduce = self._all_reduce.update(grads, state.all_reduce)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)

            def unless_skipped(after: Any, before: Any) -> Any:
                return jax.tree.map(lambda a, b: jnp.where(weight == 0, b, a), after, before)

            after = DropComputeState(
                unless_skipped(params, state.params),
                unless_skipped(optimizer, state.optimizer),
                all_reduce._replace(
                    method=unless_skipped(all_reduce.method, state.all_reduce.method)
                ),
                state.threshold,
            )
            metrics = DropComputeMetrics(
                loss=loss / weight,
                done=done // self._workers.size,
                drop_rate=1 - done / (devices * given),
                weight=weight,
            )
            return metrics, after

        specs = (self._workers.rows_spec, P(), self.state_specs)
        return self._mapped(local, specs, (P(), self.state_specs), donate_argnums=2)

    def _mapped(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any
    ) -> Callable[..., Any]:
        # The mesh of the context if there is one, and otherwise that of the user, for the compiler.
        mesh, context = None, jax.sharding.get_abstract_mesh()
        if not (context.explicit_axes or context.manual_axes):
            types = (AxisType.Auto,) * len(self.mesh.axis_names)
            mesh = Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=types)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **options)
