"""One call of a loss, from the arguments of a user to a plan, its arrays and its modules."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynamiq_jax._inputs.shards import axes_in, check_whole, is_explicit, is_function, leaf_specs
from dynamiq_jax._worker_loss import modules
from dynamiq_jax._worker_loss.loss_plan import LossPlan, Specs
from dynamiq_jax._worker_loss.roles import by_position
from dynamiq_jax._worker_loss.signature import sort_by_role
from dynamiq_jax._worker_loss.worker_loss import WorkerLoss, compiled

P = PartitionSpec


class LossCall(NamedTuple):
    """One call of a loss."""

    plan: LossPlan
    arrays: dict[str, list[Any]]  # leaves of the arguments, by role
    modules: list[Any]  # arguments that are nnx modules

    @property
    def trees(self) -> tuple[Any, ...]:
        """Differentiated trees, by position."""
        return self.plan.signature.differentiated(self.arrays)

    def run(self, program: Callable[..., Any], *others: Any) -> Any:
        """Run a program, a function of the plan, the arrays of the call and other arrays, compiled.

        It is traced once for equal plans. The structure of a module may hold metadata that cannot
        be hashed. Then it is traced at every call outside of a `jax.jit`.
        """
        try:
            hash(self.plan)
        except TypeError:
            return compiled(program, self.plan)(self.arrays, *others)
        return self.plan.work.programs(program, self.plan)(self.arrays, *others)

    def update_modules(self, rests: Sequence[Any]) -> None:
        """Write the state after a call to the modules among its arguments."""
        for module, rest in zip(self.modules, rests, strict=True):
            modules.update(module, rest)


def plan_call(work: WorkerLoss, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossCall:
    """Plan a call of a loss, and check its arguments.

    Raises:
      ValueError: arguments, specs or a context that are not possible; see `value_and_grad`.
    """
    args, kwargs = by_position(work.loss_fn, args, kwargs)
    work.workers.check_context()
    work.roles.check(len(args), kwargs)
    signature, arrays = sort_by_role(args, kwargs, work.roles, work.axes)
    specs = _specs_of(work, signature.differentiated(arrays))
    plan = LossPlan(work, signature, specs)
    return LossCall(plan, arrays, signature.modules_in(args, kwargs))


def _specs_of(work: WorkerLoss, trees: tuple[Any, ...]) -> Specs:
    """Return the specs of the leaves of the differentiated trees; None if nothing shows them."""
    for tree in trees:
        check_whole("tree", tree)
    if work.specs is None:
        return _placed(trees, work.mesh)
    if is_function(work.specs):
        specs = leaf_specs(trees, tuple(map(work.specs, trees)))
    else:
        specs = leaf_specs(trees, work.roles.in_argnums_order(work.specs))
    for (path, _), spec in zip(jax.tree.leaves_with_path(trees), specs, strict=True):
        if named := axes_in(spec, work.workers.axes):
            raise ValueError(
                f"specs gives {spec} for tree{jax.tree_util.keystr(path[1:])}, but "
                f"{named[0]!r} is an axis of the workers, each of which has whole parameters. "
                "Give the other axes that split them, or P(). For gradients that are split "
                "over the workers, see dq.psum_scatter."
            )
    return tuple(specs)


def _placed(trees: tuple[Any, ...], mesh: Mesh) -> Specs:
    """Return the placement of leaves on the mesh; None for tracers, which have none."""
    explicit = is_explicit()
    specs = []
    for leaf in jax.tree.leaves(trees):
        if explicit:
            specs.append(jax.typeof(leaf).sharding.spec)
        elif isinstance(leaf, jax.core.Tracer):
            return None
        else:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
                specs.append(sharding.spec)
            else:
                specs.append(P())
    return tuple(specs)
