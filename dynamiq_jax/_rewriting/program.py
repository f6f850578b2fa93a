"""Programs of a step, one for each kind of arguments: the passes from its trace to its schedule."""

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._inputs.shards import check_rank, leaf_specs, names_of
from dynamiq_jax._rewriting.arguments import Leaves, specs_alike
from dynamiq_jax._rewriting.contractions import Marker, hint_of_spec, workers_of
from dynamiq_jax._rewriting.inner import specs_of_shardings
from dynamiq_jax._rewriting.nodes import StepProgram
from dynamiq_jax._rewriting.origins import origins_of
from dynamiq_jax._rewriting.reading import chosen
from dynamiq_jax._rewriting.schedule import schedule
from dynamiq_jax._rewriting.steps import EvaluationSchedule, KeptSum, Reduce
from dynamiq_jax._rewriting.sums import NO_GRADIENT, SMALL, Selection
from pallas_kernels._jax import compat, equations


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledStep:
    """Step that is traced and scheduled for some arguments."""

    schedule: EvaluationSchedule
    groups: tuple[Reduce, ...]
    exact: tuple[KeptSum, ...]  # sums that stay as they are
    manual: frozenset[str]  # axes of its maps and around it
    axes: frozenset[str]  # these, and those of the meshes of its arguments
    results: Any  # structure: leaves of what the step returns, and new arrays of its objects
    donated: tuple[int, ...]  # numbers of the arrays of the arguments

    def check_found(self, selection: Selection) -> None:
        """Raise ValueError if there is no sum to compress, with the reason of each one."""
        if self.groups:
            return
        lines = "".join(
            f"\n  {each.operation} of {each.dtype.name}{list(each.shape)} over {each.axes}, "
            f"{each.source or 'of an unknown line'}: {why}"
            for each, why, _, _ in self.exact
        )
        axis = selection.axes[0]
        what = f"These stay exact:{lines}" if lines else "It has no sum over a named axis."
        remedies = []
        if any(why in NO_GRADIENT.values() for _, why, _, _ in self.exact) or not lines:
            remedies.append(
                "Take gradients inside of the step: those of a compressed function would not be "
                "compressed. If they are arguments of the step, give only=lambda s: s.origin == "
                "'other', which compresses what no backward pass has made."
            )
        if any(why == SMALL for _, why, _, _ in self.exact):
            remedies.append(
                f"Give a Compression with a smaller exact_below={selection.exact_below}."
            )
        if self.axes and axis not in self.axes:
            remedies = [f"The axes of the step and its arguments are {tuple(sorted(self.axes))}."]
        elif axis not in self.manual and not lines:
            what = f"No argument is known to be split over {axis!r}, and no map has that axis."
            remedies = [
                "Split the rows of the batch: jax.device_put(batch, NamedSharding(mesh, "
                f"PartitionSpec({axis!r}))). Inside of another jax.jit, dq.compress, "
                "jax.eval_shape or jax.make_jaxpr, arguments have no shardings: give in_specs= of "
                "NamedShardings, or of PartitionSpecs under jax.set_mesh, or call eval_shape and "
                "trace of the step."
            ]
        remedies.append("Give missing_ok=True if this step may stay as it is.")
        raise ValueError(
            f"The step has no sum over axis_name={selection.axis_name!r} to compress. {what}\n"
            + " ".join(remedies)
        )

    def check_measurable(self) -> None:
        """Raise ValueError if the metrics of a group would be those inside of an equation."""
        inside = next((e.around.inside for e in self.groups if e.around.inside is not None), None)
        if inside is not None:
            raise ValueError(
                "with_metrics=True, but the step has sums to compress inside of "
                f"{inside.primitive.name!r}, from {equations.place(inside)}, which has no such "
                "result. Write the sum there with dq.pmean(..., with_metrics=True), or leave "
                "with_metrics out."
            )


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the search for garbage in cycles, which takes a third of the time of a trace.

    Most of the many objects of a trace live until it ends, and would be looked at again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def scheduled(
    fun: Callable[..., Any],
    leaves: Leaves,
    shardings: Sequence[Any],
    in_specs: Any,
    selection: Selection,
    *,
    opens_all: bool,
) -> ScheduledStep:
    """Trace a step, mark the sums that the compiler places, find gradients, choose sums, and group
    them.

    Args:
      fun: the step.
      leaves: those of its arguments.
      shardings: of the arrays of its arguments, or None.
      in_specs: how its arguments are split, if the user says so.
      selection: rule for the sums to compress.
      opens_all: whether the caller takes over the settings of a step that is jitted.
    """
    program, results = _traced(fun, leaves)
    with collector_paused():
        known = [
            before if given is None else given
            for before, given in zip(shardings, equations.shardings_of(program, "in"), strict=True)
        ]
        specs = _specs(leaves, known, in_specs)
        workers = workers_of(selection.axes[0], [*known, *jax.tree.leaves(in_specs)], program)
        manual = frozenset(equations.bound_axes(program).union(compat.axes_in_scope()))
        meshes = [each.mesh for each in known if isinstance(each, NamedSharding)]
        meshes += [workers.mesh] if workers else []
        axes = manual.union(*(mesh.axis_names for mesh in meshes))
        selection.check_bound(axes)
        _check_in_specs(in_specs, axes)
        likely: dict[int, PartitionSpec] = {}
        if workers is not None:
            rows = [hint_of_spec(spec or (), workers) for spec in specs]
            program, _ = Marker(workers).program(program, rows)
            if len(workers.mesh.axis_names) > 1:
                likely = specs_alike(results[0], leaves, specs)
        marked = StepProgram(
            program,
            input_specs={i: spec for i, spec in enumerate(specs) if spec is not None},
            output_specs=specs_of_shardings(equations.shardings_of(program, "out")),
            likely_specs=likely,
        )
        made, sums = schedule(
            chosen(*origins_of(marked), selection), selection, opens_all=opens_all
        )
        return ScheduledStep(
            made,
            tuple(each for each in sums if isinstance(each, Reduce)),
            tuple(each for each in sums if isinstance(each, KeptSum)),
            manual,
            axes,
            jax.tree.structure(results),
            tuple(equations.donated_inputs(program)),
        )


def _traced(fun: Callable[..., Any], leaves: Leaves) -> tuple[Any, tuple[Leaves, Any]]:
    """Return the program of a step, and its results by their types: leaves, and new arrays of
    objects.
    """

    def flat(*arrays: Any) -> Any:
        (args, kwargs), objects = leaves.with_arrays(arrays).joined()
        results = Leaves.of(fun(*args, **kwargs), is_jitted=equations.is_jitted(fun))
        return results, leaves.check_graph(objects)

    try:
        program, results = jax.make_jaxpr(flat, return_shape=True)(*leaves.arrays)
    except jax.errors.JAXTypeError as error:
        name = getattr(fun, "__name__", "the step")
        error.add_note(
            f"dq.compress traces all of {name}, as jax.jit does: no array has values there. "
            "Move what needs them, such as float(loss), behind the step."
        )
        raise
    return equations.without_unused(program), results


def _specs(leaves: Leaves, shardings: Sequence[Any], in_specs: Any) -> list[PartitionSpec | None]:
    """Return the specs of the arrays of arguments: those of the user, or of shardings."""
    of_shardings = specs_of_shardings(shardings)
    known = [of_shardings.get(number) for number in range(len(shardings))]
    if in_specs is None:
        return known
    numbers, _ = jax.tree.unflatten(leaves.structure, range(len(leaves.kinds)))
    given = leaf_specs(numbers, in_specs, "in_specs")
    keywords = [None] * (len(leaves.kinds) - len(given))
    of_arrays = leaves.of_arrays([*given, *keywords])
    for spec, array in zip(of_arrays, leaves.arrays, strict=False):
        if spec is not None:
            check_rank("in_specs", "an array", spec, array.shape)
    return [*of_arrays, *known[len(of_arrays) :]]


def _check_in_specs(in_specs: Any, axes: frozenset[str]) -> None:
    """Raise ValueError for a spec of the user that names none of the axes, if they are known."""
    for given in jax.tree.leaves(in_specs):
        spec = given.spec if isinstance(given, NamedSharding) else given
        names = {name for part in spec for name in names_of(part)}
        if axes and not names <= axes:
            raise ValueError(
                f"in_specs={in_specs!r:.200} has {min(names - axes)!r}, which is no axis of the "
                f"step. Its axes are {tuple(sorted(axes))}."
            )
