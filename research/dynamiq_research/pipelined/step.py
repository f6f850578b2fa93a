"""Steps whose all-reduce runs under two passes: half of it backward, half of it forward (DeAR)."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax import Compression, DynamiQ
from dynamiq_jax.parts import check_integer, check_number, vary_over
from dynamiq_jax.parts.collectives import (
    EXACT,
    AxisName,
    Choice,
    Leaves,
    Plan,
    Request,
    axis_names,
    check,
    check_agreement,
    check_chunked,
    check_like,
    check_optimizer,
    check_plan,
    check_shared_params,
    exact_bytes_sent,
    find_axes,
    last_token,
    never,
    plan_tree,
    plan_without_arrays,
    record,
    remember,
    resolve,
    scope,
    split_route,
    token_of,
)
from dynamiq_jax.topologies import Ring
from dynamiq_research.pipelined import halves
from dynamiq_research.pipelined.halves import GatherMean, ScatterMean
from dynamiq_research.pipelined.state import (
    PipelinedReport,
    PipelinedState,
    PipelinedUpdate,
    check_state,
    shard_names,
)

P = PartitionSpec
Value = TypeVar("Value")

_UNDER_COMPUTATION = Compression(
    DynamiQ(rounding="correlated"), Ring(unroll=True), bucket_bytes=25 * 2**20, unrolled_buckets=64
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # optimizers cannot be compared
class Pipelined:
    """Steps whose all-reduce runs under the backward pass and the next forward pass (DeAR).

        pipelined = dynamiq_research.Pipelined(optimizer=optax.adamw(1e-3), axis_name="data")
        state = pipelined.init(params)
        ...
        loss_and_grads = lambda params: jax.value_and_grad(loss_fn)(params, batch)
        loss, state = pipelined.step(loss_and_grads, state)
        ...
        params = pipelined.flush(state)

    An all-reduce is a reduce-scatter and an all-gather. A step begins with the second half of the
    step before, the first leaves first. The optimizer updates the leaves of a bucket when that has
    arrived, and the forward pass goes on with them while the next bucket travels. A step ends with
    the first half of its own, bucket by bucket, the last leaves first, as soon as the backward pass
    has their gradients. The result is the same as with both halves at the end of a step.

    `step` is `gather`, the passes, and `scatter`, which a program can also call one by one.

    Everything must run inside `jax.shard_map` (or `jax.vmap`) with the axis. The forward pass uses
    leaves as they come only if the tree has them in order of use, and if layers are no `lax.scan`.

    The method is DeAR (arXiv 2302.12445, section III).
    """

    # Runs on the whole tree. An optimizer that treats leaves one by one, such as adamw, updates a
    # leaf as soon as its bucket is there. With one that needs all leaves at once, such as
    # optax.clip_by_global_norm, all updates wait for the last bucket: use `clip_norm` instead.
    optimizer: optax.GradientTransformation
    axis_name: AxisName  # axis of the slow link, or several axes, the slowest first; see `psum`
    # Without state, and of chunks. Unlike in `all_gather`, the default rounds without bias in both
    # halves. Its topology, that of the first half, is a ring without a loop, under which nothing
    # runs, and its buckets have 25 MiB, which a method or name alone keeps.
    method: Choice = _UNDER_COMPUTATION
    # Largest global norm of the mean gradient, which is scaled down to it; None for no limit. The
    # norm is computed from the shards, before the gather. It is exact but for the compression of
    # the second half.
    clip_norm: float | None = None
    seed: int = 0  # of the rounding noise, the same on all workers
    # Smaller buckets leave earlier and arrive earlier, and pay more latency. In a checkout,
    # `python -m benchmarks.speed.tune_buckets` finds a size by measurement.

    def __post_init__(self):
        for method in self._request.compression.policy.known:
            check_chunked(method, "dynamiq_research.Pipelined")
        check_optimizer("optimizer", self.optimizer, "optax.adamw(1e-3)")
        check_integer("seed", self.seed, -(2**31), 2**32 - 1)
        if self.clip_norm is not None:
            positive = np.nextafter(0, 1)
            check_number("clip_norm", self.clip_norm, positive, np.inf, "more than 0, or None")

    @property
    def state_specs(self) -> PipelinedState:
        """Specs of the state over the axes of the workers, for `jax.shard_map`."""
        names = axis_names(self.axis_name)
        specs: Any = PipelinedState  # specs in place of arrays
        return specs(
            step=P(), params=P(), opt_state=P(), shards=P(names), exact=P(names), is_pending=P()
        )

    def wire_report(self, params: Any, axis_size: Any, *, mesh: Any = None) -> PipelinedReport:
        """Count the bytes of one step, without running it; see `dq.wire_report`.

        Args:
          params: tree of arrays, or of anything with `shape` and `dtype`.
          axis_size: number of workers, or names of their axes beside a mesh.
          mesh: the mesh over which `specs` split the parameters.
        """
        compression = self._request
        plan = plan_without_arrays(params, axis_size, compression, mesh=mesh)
        axes = plan.collective.axes
        leaves = [plan.parts[index] for index, _ in plan.exact]
        scattering, gathering = ScatterMean(axes), GatherMean(axes)
        sizes = [halves.held_size(bucket) for bucket in plan.buckets]
        return PipelinedReport(
            scattered_bytes=sum(scattering.bytes_sent(b) for b in plan.buckets),
            gathered_bytes=sum(gathering.bytes_sent(b) for b in plan.buckets),
            exact_bytes=exact_bytes_sent(axes, leaves),
            state_bytes=4 * sum(sizes) + sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
            buckets=len(plan.buckets),
        )

    def init(self, params: Any) -> PipelinedState:
        """Return the state before the first step.

        Args:
          params: pytree of floating arrays, the same on all workers.

        Raises:
          ValueError: a leaf that differs between workers.
          TypeError: a leaf that is not floating.
        """
        check_shared_params(params, find_axes(self.axis_name), "mean gradient")
        zero = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
        return self.resume(PipelinedUpdate(zero[0], params, self.optimizer.init(params), zero[1]))

    def resume(self, updated: PipelinedUpdate) -> PipelinedState:
        """Return a state in which nothing is pending.

        With this state, a run goes on from the result of `gather`, also with another number of
        workers.
        """
        _check_updated(updated)
        plan, _ = self._plan(updated.params)
        names, of_exact = plan.collective.axes.names, _exact_specs(plan)

        def zeros() -> tuple[tuple[Array, ...], Leaves]:
            shards = tuple(
                vary_over(
                    jnp.zeros((1, halves.held_size(bucket)), jnp.float32),
                    (*names, *bucket.split_over),
                )
                for bucket in plan.buckets
            )
            exact = {}
            for index, _ in plan.exact:
                zero = jnp.zeros((1, *plan.parts[index].shape), plan.parts[index].dtype)
                exact[index] = vary_over(zero, (*names, *plan.split_over[index]))
            return shards, exact

        mapped = plan.shards.map(zeros, in_specs=(), out_specs=(plan.bucket_specs, of_exact))
        shards, exact = mapped()
        return PipelinedState(
            step=updated.step,
            params=updated.params,
            opt_state=updated.opt_state,
            shards=dict(zip(shard_names(plan), shards, strict=True)),
            exact=tuple(exact[index] for index, _ in plan.exact),
            is_pending=jnp.zeros((), jnp.bool_),
        )

    def step(
        self, value_and_grads: Callable[[Any], tuple[Value, Any]], state: PipelinedState
    ) -> tuple[Value, PipelinedState]:
        """Take one step: gather and apply the gradients of the one before, and scatter new ones.

        Args:
          value_and_grads: function of parameters to anything, such as the loss of this worker, and
            the gradients of this worker. Its parameters vary over the axis, so that JAX does not
            sum their gradients.
          state: from `init` or from the step before.

        Returns:
          What `value_and_grads` returns beside the gradients, and the state.

        Raises:
          ValueError: as `gather` and `scatter`.
        """
        updated = self.gather(state)
        names = find_axes(self.axis_name).names
        value, grads = value_and_grads(vary_over(updated.params, names))
        return value, self.scatter(grads, updated)

    @jax.named_scope("pipelined.gather")
    def gather(self, state: PipelinedState) -> PipelinedUpdate:
        """Gather the mean gradients that are pending, and apply them.

        Args:
          state: from `init`, or from `scatter` in the step before.

        Returns:
          Parameters, the same bits on all workers, optimizer state, and the norm of the gradient.
          In the first step they are those of `init`. NaN or Inf of any worker surface in the
          parameters, as for `psum`; with `clip_norm`, in all of them.

        Raises:
          ValueError: shards of other parameters, options or numbers of workers.
        """
        if not isinstance(state, PipelinedState):
            raise TypeError(
                f"state is a {type(state).__name__}, not a PipelinedState. Give the result of init "
                "or scatter."
            )
        plan, _ = self._plan(state.params)
        again = PipelinedUpdate(*state[:3], jnp.float32(0))
        check_state(state, jax.eval_shape(lambda: self.resume(again)))
        check_agreement(plan, self._key(state.step))
        means, norm = self._means(state, plan)
        if self.clip_norm is not None:
            limit = np.float32(self.clip_norm)
            scale = jnp.where(norm < limit, np.float32(1), limit / norm)
            means = jax.tree.map(lambda g: _scaled(g, scale), means)
        updates, opt_state = self.optimizer.update(means, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        def if_pending(after: Array, before: Array) -> Array:
            return jnp.where(state.is_pending, after, before)

        return PipelinedUpdate(
            step=state.step,
            params=jax.tree.map(if_pending, params, state.params),
            opt_state=jax.tree.map(if_pending, opt_state, state.opt_state),
            gradient_norm=jnp.where(state.is_pending, norm, np.float32(0)),
        )

    @jax.named_scope("pipelined.scatter")
    def scatter(self, grads: Any, updated: PipelinedUpdate) -> PipelinedState:
        """Average gradients, each worker its part, and keep them as pending.

        Args:
          grads: gradients of this worker, like the parameters.
          updated: from `gather` in this step.

        Raises:
          ValueError: gradients of other shapes or dtypes than the parameters, or that are summed
            over the workers already.
        """
        _check_updated(updated)
        check_like(
            grads,
            updated.params,
            "grads are not like the parameters",
            "Give gradients of the same structure, shapes and dtypes.",
        )
        plan, leaves = self._plan(grads)
        record(plan)
        key = check(plan, leaves, self._key(updated.step))

        def local(
            leaves: Leaves, key: Array, token: Array | None
        ) -> tuple[tuple[Array, ...], Leaves, Array | None]:
            shards, token = halves.scatter(plan, leaves, key, token)
            exact = {index: leaves[index][None] for index, _ in plan.exact}
            return tuple(shard[None] for shard in shards), exact, plan.shards.same(token)

        mapped = plan.shards.map(
            local,
            in_specs=(dict(enumerate(plan.shards.specs)), P(), P()),
            out_specs=(plan.bucket_specs, _exact_specs(plan), P()),
        )
        shards, exact, token = mapped(dict(enumerate(leaves)), key, last_token())
        remember(token)
        return PipelinedState(
            step=updated.step + 1,
            params=updated.params,
            opt_state=updated.opt_state,
            shards=dict(zip(shard_names(plan), shards, strict=True)),
            exact=tuple(exact[index] for index, _ in plan.exact),
            # True, but not a constant. Where `scatter` and `gather` are in one program, a constant
            # would remove the selection in `gather`. XLA would then fuse, and so round, the
            # optimizer in another way.
            is_pending=~never(updated.step),
        )

    def flush(self, state: PipelinedState) -> Any:
        """Return parameters to which all gradients have been applied, to evaluate or to keep.

        A run goes on from the state itself, which is not changed.
        """
        return self.gather(state).params

    @property
    def _request(self) -> Request:
        settings = {"seed": self.seed, "clip_norm": self.clip_norm}
        method = self.method
        if not isinstance(method, Compression):
            method, route = split_route(method) if isinstance(method, str) else (method, None)
            topology = route or _UNDER_COMPUTATION.topology
            method = dataclasses.replace(_UNDER_COMPUTATION, method=method, topology=topology)
        return resolve(method, settings=settings)

    def _plan(self, tree: Any) -> tuple[Plan, tuple[Array, ...]]:
        collective = ScatterMean(find_axes(self.axis_name))
        plan, leaves = plan_tree(collective, tree, self._request)
        check_plan(plan)
        return plan, leaves

    def _key(self, step: Array) -> Array:
        return jax.random.fold_in(jax.random.key(self.seed), step)

    def _means(self, state: PipelinedState, scattered: Plan) -> tuple[Any, Array]:
        """Gather the mean gradients, and compute their norm before that."""
        collective = GatherMean(scattered.collective.axes)
        plan = dataclasses.replace(scattered, collective=collective)

        def local(
            shards: tuple[Array, ...], exact: Leaves, key: Array, token: Array | None
        ) -> tuple[Leaves, Array, Array | None]:
            own = tuple(shard[0] for shard in shards)
            with scope(EXACT):
                means, _ = collective.exact({i: leaf[0] for i, leaf in exact.items()}, token)
            norm = _norm(own, means, plan)  # of the exact means, so it comes after them
            gathered, token = halves.gather(plan, own, key, token_of([norm]))
            return means | gathered, norm, plan.shards.same(token)

        mapped = plan.shards.map(
            local,
            in_specs=(plan.bucket_specs, _exact_specs(plan), P(), P()),
            out_specs=(dict(enumerate(plan.shards.specs)), P(), P()),
        )
        shards = tuple(state.shards[name] for name in shard_names(plan))
        exact = {index: leaf for (index, _), leaf in zip(plan.exact, state.exact, strict=True)}
        key = self._key(state.step - 1)
        means, norm, token = mapped(shards, exact, key, last_token())
        remember(token)
        leaves = [means[index] for index in range(len(plan.leaves))]
        return jax.tree.unflatten(plan.structure, leaves), norm


def _check_updated(updated: Any) -> None:
    """Raise TypeError for a state, whose gradients may be pending."""
    if not isinstance(updated, PipelinedUpdate):
        raise TypeError(
            f"updated is a {type(updated).__name__}, not a PipelinedUpdate. Give the result of "
            "gather: gradients that are pending would be lost otherwise."
        )


def _exact_specs(plan: Plan) -> dict[int, PartitionSpec]:
    """Return how exact leaves with a leading axis are split over the axes of their shards."""
    return {index: P(None, *plan.shards.specs[index]) for index, _ in plan.exact}


def _norm(shards: tuple[Array, ...], exact: Leaves, plan: Plan) -> Array:
    """Return the global norm of a mean from the shards and exact leaves of one device."""
    squares: dict[tuple[str, ...], Array] = {}  # by the axes to sum them over

    def add(values: Array, axes: tuple[str, ...]) -> None:
        square = jnp.sum(jnp.square(values.astype(jnp.float32)))
        squares[axes] = squares[axes] + square if axes in squares else square

    for bucket, shard in zip(plan.buckets, shards, strict=True):
        own = shard[: halves.shard_size(bucket)]  # without the norms that a worker carries
        add(own, (*plan.collective.axes.names, *bucket.split_over))
    for index, mean in exact.items():
        add(mean, plan.split_over[index])
    sums = [lax.psum(square, axes) if axes else square for axes, square in squares.items()]
    return jnp.sqrt(sum(sums, jnp.zeros((), jnp.float32)))


def _scaled(leaf: Array, by: Array) -> Array:
    """Return a product with a scalar in the dtype of the leaf, computed in 32 bits or more."""
    values = leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf
    return (values * jnp.asarray(by, values.dtype)).astype(leaf.dtype)
