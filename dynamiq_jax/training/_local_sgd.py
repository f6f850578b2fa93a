"""Local steps, and now and then an outer step on the mean change of the weights (DiLoCo)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec

from dynamiq_jax._api.wire_report import WireReport, report_of
from dynamiq_jax._buckets.axes import AxisName, axis_names, find_axes
from dynamiq_jax._check import agreement
from dynamiq_jax._check.check import check_plan
from dynamiq_jax._collectives.all_reduce import AllReduce
from dynamiq_jax._core.validation import check_integer, check_number, check_optimizer, check_seed
from dynamiq_jax._inputs.compression import Choice, Compression
from dynamiq_jax._inputs.request import Request, resolve
from dynamiq_jax._inputs.shards import leaf_specs
from dynamiq_jax._plan.plan import Plan, plan_tree
from dynamiq_jax._run.driver import run
from dynamiq_jax._states.states import all_names, check_type, first_states
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.training._fragments import Fragments
from dynamiq_jax.training._local_sgd_state import LocalSGDState, check_fragment, check_settings
from dynamiq_jax.training._params import check_like, check_shared_params
from pallas_kernels._jax import compat

P = PartitionSpec
Carry = tuple[Any, LocalSGDState]  # parameters of this worker, and the state


class Due(NamedTuple):
    """Fragments that one step sends and applies; None for none."""

    sent: int | None
    applied: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # optimizers cannot be compared
class LocalSGD:
    """Local steps without traffic, and an outer step on the mean change of the weights (DiLoCo).

        local_sgd = dq.training.LocalSGD(axis_name="data", every=20)
        state = local_sgd.init(params)
        ...
        params = optax.apply_updates(params, updates)  # of each worker's own optimizer
        params, state = local_sgd.update(params, state)

    Each worker trains its own copy of the parameters. After `every` local steps, the workers
    average their changes from the reference, compressed. An outer optimizer takes this
    mean change as a gradient, and moves the reference. All workers go on from there.

    With `fragments`, each part of the parameters has its own turn: as many bytes, in smaller
    messages that are spread over the steps. With `delay`, a mean change that is sent in one step is
    applied some steps later, and local steps go on meanwhile. Call `update` before the local step
    then, and compute gradients from its result, so that XLA can run the transfer meanwhile. At the
    end of a run, changes that are pending are in no `reference`.

    `update` must run inside `jax.shard_map` (or `jax.vmap`) with the axis. State and `init` need
    parameters that are the same on all workers. `reference` is the model to evaluate and to keep.

    The methods are DiLoCo (arXiv 2311.08105, Algorithm 1) and Streaming DiLoCo (arXiv 2501.18512).
    Error feedback is a part of the method, as in `method="ef+dynamiq:3"`.

    A run can go on from a state with another `every` (without a delay), `mixing`, `topology` or
    `seed`, another rate of `outer`, or another method without state. A state of other leaves,
    fragments or delays, of another kind of `outer`, or of a method with other states, is refused.
    """

    axis_name: AxisName  # axis of the slow link, or several axes, the slowest first; see `psum`
    every: int = 20  # local steps between two turns of a fragment: H in the papers
    # Takes the mean change (reference - parameters) as a gradient. It runs on each fragment alone.
    outer: optax.GradientTransformation = optax.sgd(0.7, momentum=0.9, nesterov=True)
    method: Choice = Compression(DynamiQ(bits=4))
    # Parts of about equal size: leaves, and slices of leaves that are larger than such a part.
    fragments: int = 1
    delay: int = 0  # local steps between sending a mean change and applying it
    # Share of a worker's own weights that stays in them when an outer step is applied: alpha of
    # Streaming DiLoCo. Without it, local steps during the delay are lost.
    mixing: float = 0.0
    seed: int = 0  # of the rounding noise, the same on all workers

    def __post_init__(self):
        _ = self._request  # raises if it is not possible
        check_optimizer("outer", self.outer, "optax.sgd(0.7, momentum=0.9, nesterov=True)")
        check_integer("every", self.every, 1)
        check_integer("fragments", self.fragments, 1, self.every)
        check_integer("delay", self.delay, 0, self.every - 1)
        check_number("mixing", self.mixing, 0, 1)
        check_seed(self.seed)

    @property
    def state_specs(self) -> LocalSGDState:
        """Specs of the state over the axes of the workers, for `jax.shard_map`."""
        names = axis_names(self.axis_name)
        specs: Any = LocalSGDState  # specs in place of arrays
        return specs(step=P(), reference=P(), outer=P(), pending=P(), method=P(names))

    def split(self, params: Any) -> tuple[Any, ...]:
        """Return the fragments of parameters.

        Each is a tree like `params`, with None in place of leaves of other fragments, and slices of
        leaves that are cut.
        """
        return tuple(self._fragments(params).split(params).values())

    def wire_report(
        self, params: Any, axis_size: Any, *, mesh: Any = None
    ) -> tuple[WireReport, ...]:
        """Report the bytes of one synchronization of each fragment; see `dq.wire_report`.

        A period of `every` steps sends each of them once.

        Args:
          params: tree of arrays, or of anything with `shape` and `dtype`.
          axis_size: number of workers, or names of their axes beside a mesh.
          mesh: the mesh over which `specs` split the parameters.
        """
        request = self._of_fragments
        if mesh is not None and request.compression.specs is None:
            request = request.with_specs(P())
        self._request.compression.policy.methods(params)
        parts = jax.eval_shape(self.split, params)
        return tuple(report_of(request, part, axis_size, mesh=mesh) for part in parts)

    def due(self, step: int) -> Due:
        """Return which fragments a step sends and applies, counted from 0."""
        check_integer("step", step, 0)

        def turn(taken: int) -> int | None:
            return next((f for f in range(self.fragments) if self._is_turn(f, taken)), None)

        return Due(turn(step + 1), turn(step + 1 - self.delay))

    def init(self, params: Any) -> LocalSGDState:
        """Return the state before the first step.

        Args:
          params: pytree of floating arrays, the same on all workers.

        Raises:
          ValueError: a leaf that differs between workers; a tree too small for as many fragments.
          TypeError: a leaf that is not floating.
        """
        axes = find_axes(self.axis_name)
        check_shared_params(params, axes, "mean change")
        parts = self._fragments(params).split(params)
        with_states = parts if self._request.is_stateful(params) else {}
        return LocalSGDState(
            step=jnp.zeros((), jnp.int32),
            reference=params,
            outer={name: self.outer.init(part) for name, part in parts.items()},
            pending={timing: jax.tree.map(jnp.zeros_like, parts) for timing in self._timing},
            method={name: first_states(self._plan(part)) for name, part in with_states.items()},
        )

    def update(
        self, params: Any, state: LocalSGDState, *, due: Due | None = None
    ) -> tuple[Any, LocalSGDState]:
        """Synchronize the fragments that are due after a local step.

        Args:
          params: parameters of this worker after its local step, like those of `init`.
          state: the state.
          due: `local_sgd.due(step)` of this step, static, for a program of this kind of step alone:
            most of them then have no collective at all. Without it, one program serves all steps,
            and chooses at run time. The results are the same.

        Returns:
          Parameters of this worker to go on with, and the state. NaN or Inf of any worker surface
          in `reference`, on all workers, as for `psum`.

        Raises:
          ValueError: a state of other parameters, fragments or delays, or of another outer
            optimizer or method.
        """
        check_type(state, LocalSGDState)
        if due is not None:
            self._check_due(due)
        fragments = self._fragments(params)
        self._check_state(state, fragments, params)
        axes = find_axes(self.axis_name)
        # All processes have the same settings, also in a step that sends nothing.
        plan, _ = plan_tree(AllReduce(axes, mean=True), params, self._request)
        agreement.check(plan, jax.random.key(self.seed))
        params = compat.match_varying(params, lax.axis_index(axes.names))
        carry = params, state
        send, apply = (functools.partial(act, fragments) for act in (self._send, self._apply))
        if due is not None:
            if self.delay and due.applied is not None:
                carry = apply(due.applied, carry)
            if due.sent is not None:
                carry = send(due.sent, carry)
        else:
            taken = state.step + 1
            if self.delay:
                carry = self._choose(apply, taken - self.delay, carry)
            carry = self._choose(send, taken, carry)
        params, state = carry
        return params, state._replace(step=state.step + 1)

    def _check_due(self, due: Any) -> None:
        known = (None, *range(self.fragments))
        if not isinstance(due, Due) or not {due.sent, due.applied} <= {*known}:
            raise ValueError(
                f"due={due!r:.80} is none of the {self.fragments} fragments. Give "
                "local_sgd.due(step)."
            )

    @property
    def _timing(self) -> tuple[str, ...]:
        """Period and delay of changes that are pending; none without a delay."""
        return (f"every_{self.every}_delay_{self.delay}",) if self.delay else ()

    def _check_state(self, state: LocalSGDState, fragments: Fragments, params: Any) -> None:
        """Raise ValueError for a state of another configuration, or of other parameters."""
        is_stateful = self._request.is_stateful(params)
        check_settings(state, fragments.names, self._timing)
        check_like(
            params,
            state.reference,
            "params are not like those of the state",
            "Give parameters of the structure, shapes and dtypes of init: a local step that "
            "promotes them, as with a float32 rate, has to cast its result.",
        )
        for name, part in fragments.split(params).items():
            first = jax.eval_shape(self.outer.init, part)
            states = all_names(self._plan(part)) if is_stateful else ()
            check_fragment(state, name, first, states)

    def _plan(self, part: Any) -> Plan:
        """Plan the mean of a fragment."""
        collective = AllReduce(find_axes(self.axis_name), mean=True)
        plan, _ = plan_tree(collective, part, self._of_fragments)
        check_plan(plan)
        return plan

    @property
    def _request(self) -> Request:
        # Which step sends what, and its noise: the same in all processes.
        shared = ("every", "fragments", "delay", "mixing", "seed")
        return resolve(self.method, settings={name: getattr(self, name) for name in shared})

    @property
    def _of_fragments(self) -> Request:
        """Compression of a fragment, which has no leaf for some patterns of a policy.

        `update` itself checks that processes agree.
        """
        request, compression = self._request, self._request.compression
        policy = dataclasses.replace(request.compression.policy, all_used=False)
        compression = dataclasses.replace(compression, method=policy, check_agreement=False)
        if compression.bucketing == "auto":  # all of a change is there when it is sent
            compression = dataclasses.replace(compression, bucketing="striped")
        return dataclasses.replace(request, compression=compression)

    def _fragments(self, params: Any) -> Fragments:
        if self._request.compression.specs is not None:
            specs = leaf_specs(params, self._request.compression.specs)
        elif jax.sharding.get_abstract_mesh().explicit_axes:
            specs = [jax.typeof(leaf).sharding.spec for leaf in jax.tree.leaves(params)]
        else:
            specs = [P()] * len(jax.tree.leaves(params))
        return Fragments.of(params, specs, self.fragments)

    def _is_turn(self, fragment: int, taken: Any) -> Any:
        """Return whether a fragment has its turn after some local steps."""
        first = self.every * (fragment + 1) // self.fragments
        return (taken >= first) & ((taken - first) % self.every == 0)

    def _choose(self, act: Callable[[int, Carry], Carry], taken: Array, carry: Carry) -> Carry:
        """Act on the fragment that has its turn, if one has."""
        branch = sum(jnp.where(self._is_turn(f, taken), f + 1, 0) for f in range(self.fragments))
        turns = [functools.partial(act, fragment) for fragment in range(self.fragments)]
        return lax.switch(branch, [lambda carry: carry, *turns], carry)

    def _send(self, fragments: Fragments, fragment: int, carry: Carry) -> Carry:
        """Average the change of a fragment, and apply it unless there is a delay."""
        params, state = carry
        name = fragments.names[fragment]
        change = jax.tree.map(
            lambda before, now: compat.match_varying(before, now) - now,
            fragments.take(state.reference, fragment),
            fragments.take(params, fragment),
        )
        outcome = run(
            AllReduce(find_axes(self.axis_name), mean=True),
            change,
            jax.random.fold_in(jax.random.key(self.seed), state.step),
            self._of_fragments,
            states=state.method[name] if state.method else {},
        )
        if state.method:
            state = state._replace(method={**state.method, name: outcome.states})
        if self.delay:
            (timing,) = self._timing
            pending = {**state.pending[timing], name: outcome.tree}
            return params, state._replace(pending={timing: pending})
        return self._step(fragments, fragment, outcome.tree, (params, state))

    def _apply(self, fragments: Fragments, fragment: int, carry: Carry) -> Carry:
        """Apply the change that a fragment has sent."""
        (pending,) = carry[1].pending.values()
        return self._step(fragments, fragment, pending[fragments.names[fragment]], carry)

    def _step(self, fragments: Fragments, fragment: int, change: Any, carry: Carry) -> Carry:
        """Take the outer step of a fragment."""
        params, state = carry
        name = fragments.names[fragment]
        before = fragments.take(state.reference, fragment)
        updates, outer = self.outer.update(change, state.outer[name], before)
        after = optax.apply_updates(before, updates)

        def merged(after: Array, local: Array) -> Array:
            whole = compat.match_varying(after, local)
            if not self.mixing:  # not 0 times what a worker has, which may be NaN
                return whole
            share = np.float32(self.mixing)
            wide = local.dtype if local.dtype.itemsize >= 4 else np.dtype(np.float32)
            mixed = share.astype(wide) * local.astype(wide)
            mixed += (1 - share).astype(wide) * whole.astype(wide)
            return mixed.astype(local.dtype)

        own = jax.tree.map(merged, after, fragments.take(params, fragment))
        reference = fragments.put(state.reference, fragment, after)
        state = state._replace(reference=reference, outer={**state.outer, name: outer})
        return fragments.put(params, fragment, own), state
