"""Train step with compressed sums: traced, scheduled, and compiled for each kind of arguments."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.checks import check_key
from dynamiq_jax._inputs.shards import leaf_specs
from dynamiq_jax._plan import recording
from dynamiq_jax._rewriting.arguments import Leaves, specs_alike
from dynamiq_jax._rewriting.contractions import Marker, RowHint, workers_of
from dynamiq_jax._rewriting.evaluate import Evaluator
from dynamiq_jax._rewriting.inner import specs_of_shardings
from dynamiq_jax._rewriting.nodes import StepProgram
from dynamiq_jax._rewriting.origins import origins_of
from dynamiq_jax._rewriting.reading import chosen
from dynamiq_jax._rewriting.report import CompressReport, report_of
from dynamiq_jax._rewriting.rows import rows_of_spec
from dynamiq_jax._rewriting.schedule import schedule
from dynamiq_jax._rewriting.steps import EvaluationSchedule, KeptSum, Reduce
from dynamiq_jax._rewriting.sums import Selection
from dynamiq_jax._rewriting.unreduced import Metrics
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.compat import override
from pallas_kernels._jax.own_thread import is_traced

_MANY = 8  # programs of a step; one more is a warning


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """Step that is traced and scheduled for some arguments."""

    schedule: EvaluationSchedule
    groups: tuple[Reduce, ...]
    exact: tuple[KeptSum, ...]  # sums that stay as they are
    results: Leaves  # without arrays
    changed: int  # arrays of objects among the results
    donated: tuple[int, ...]  # numbers of the arrays of the arguments


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["arrays", "metrics"], meta_fields=["program"]
)
@dataclasses.dataclass(frozen=True)
class _Results:
    """Results of a program."""

    arrays: tuple[Any, ...]
    metrics: list[Metrics] | None  # of the groups, if they are returned
    program: _Program


class CompressedStep:
    """Train step with compressed sums: the result of `compress`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        key: Any,
        evaluator: Evaluator,
        *,
        in_specs: Any = None,
        missing_ok: bool = False,
    ):
        self._fun = fun
        self._key = key
        self._evaluator = evaluator
        self._in_specs = in_specs
        self._missing_ok = missing_ok
        # By all that a program depends on but types of arrays, for which `jax.jit` has programs.
        self._compiled: dict[Hashable, Any] = {}
        self._instance: Any = None  # whose method this step is, as an attribute of its class
        functools.update_wrapper(self, fun, updated=())  # attributes of an object stay its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step with its sums compressed."""
        leaves = self._leaves(args, kwargs)
        if is_traced() or any(isinstance(array, jax.core.Tracer) for array in leaves.arrays):
            return self._finished(leaves, self._run(leaves, leaves.shardings))
        if self._is_jitted:
            return self._jitted(leaves)(*args, **kwargs)
        return self._finished(leaves, self._function(leaves)(*leaves.arrays))

    def __get__(self, instance: Any, owner: type | None = None) -> "CompressedStep":
        """Return the method of an object, for a step that is an attribute of its class."""
        if instance is None:
            return self
        method = object.__new__(type(self))
        vars(method).update(vars(self), _instance=instance)  # programs, too
        return method

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the programs of this step, for copies in other processes."""
        return {**vars(self), "_compiled": {}}

    @override
    def __repr__(self) -> str:
        axis_name = self._evaluator.selection.axis_name
        return f"dq.compress({self._fun!r}, {axis_name!r})"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the step for arguments, as the method of `jax.jit` does."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the step for arguments, as the method of `jax.jit` does."""
        leaves = self._leaves(args, kwargs)
        if self._is_jitted:
            return self._jitted(leaves).trace(*args, **kwargs)
        return self._function(leaves).trace(*leaves.arrays)

    def report(self, *args: Any, **kwargs: Any) -> CompressReport:
        """List the sums of the step, with their bytes and the reason of those that stay exact.

        Nothing is run. Call it where the step is called: inside of the map, if the step is a
        function of one worker.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: keyword arguments of the step.
        """
        leaves = self._leaves(args, kwargs)
        return self._report(self._program(leaves, leaves.shardings))

    @property
    def _is_jitted(self) -> bool:
        return equations.is_jitted(self._fun)

    def _leaves(self, args: Any, kwargs: Any) -> Leaves:
        if self._instance is not None:
            args = (self._instance, *args)
        return Leaves.of((args, kwargs), is_jitted=self._is_jitted)

    def _report(self, program: _Program) -> CompressReport:
        return report_of(program.groups, program.exact, self._evaluator)

    def _jitted(self, leaves: Leaves) -> Any:
        """Return the jitted step with compressed sums for arguments as they are placed."""
        # The function is traced with tracers, whose shardings are not known.
        shardings = leaves.of_leaves(leaves.shardings)

        def make() -> Any:
            @functools.wraps(equations.unjitted(self._fun))
            def step(*args: Any, **kwargs: Any) -> Any:
                within = self._leaves(args, kwargs)
                return self._finished(within, self._run(within, within.of_arrays(shardings)))

            return equations.jit_like(step, self._fun)

        return self._remembered(shardings, make)

    def _function(self, leaves: Leaves) -> Any:
        """Return the compiled step, as a function of the arrays of its arguments."""
        shardings = leaves.shardings

        def make() -> Any:
            first = self._program(leaves, shardings)
            programs = {leaves.types: first}  # another thread may be the first to trace
            empty = leaves._replace(arrays=(), objects=())

            def step(*arrays: Any) -> _Results:
                within = empty._replace(arrays=arrays)
                return self._run(within, shardings, programs.pop(within.types, None))

            step.__name__ = getattr(self._fun, "__name__", "step")
            return jax.jit(step, donate_argnums=first.donated)

        return self._remembered((leaves.kind, shardings), make)

    def _remembered(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        if kind not in self._compiled:
            if len(self._compiled) == _MANY:
                warnings.warn(
                    f"{self!r:.200} is compiled again, after {_MANY} times: arguments that are no "
                    "arrays, or shardings, differ from those before. Give numbers that change as "
                    "arrays or Python floats, and arrays with the shardings of the step before.",
                    stacklevel=4,
                )
            self._compiled[kind] = make()
        return self._compiled[kind]

    def _run(
        self, leaves: Leaves, shardings: Sequence[Any], program: _Program | None = None
    ) -> _Results:
        """Run the step inside of a trace, with a program for its arguments, or else traced here."""
        program = program or self._program(leaves, shardings)
        recording.record_step(lambda: self._report(program))
        key = None
        if self._key is not None and program.groups:
            (args, kwargs), _ = leaves.with_arrays(leaves.arrays)
            key = check_key(self._key(*args, **kwargs), ())
        metrics: list[Metrics] | None = [] if self._evaluator.request.measures else None
        results = self._evaluator.run(program.schedule, key, *leaves.arrays, metrics=metrics)
        return _Results(tuple(results), metrics, program)

    @staticmethod
    def _finished(leaves: Leaves, results: _Results) -> Any:
        """Return what the step returns, and give its objects their new arrays."""
        arrays, program = results.arrays, results.program
        count = len(arrays) - program.changed
        if leaves.objects:
            leaves.update(leaves.objects, arrays[count:])
        returned, _ = program.results.with_arrays(arrays[:count])
        return returned if results.metrics is None else (returned, results.metrics)

    def _program(self, leaves: Leaves, shardings: Sequence[Any]) -> _Program:
        """Trace the step and schedule it.

        Raises:
          TypeError: the step assigns an array to an attribute of its object.
          ValueError: there is no sum to compress.
        """
        apart: list[Any] = []

        def flat(*arrays: Any) -> Any:
            (args, kwargs), objects = leaves.with_arrays(arrays)
            results = Leaves.of(self._fun(*args, **kwargs), is_jitted=self._is_jitted)
            changed = leaves.check_graph(objects)
            apart[:] = [results._replace(arrays=(), objects=()), len(changed)]
            return [*results.arrays, *changed]

        try:
            traced = equations.without_unused(jax.make_jaxpr(flat)(*leaves.arrays))
        except jax.errors.JAXTypeError as error:
            name = getattr(self._fun, "__name__", "the step")
            error.add_note(
                f"dq.compress traces all of {name}, as jax.jit does: no array has values there. "
                "Move what needs them, such as float(loss), behind the step."
            )
            raise
        self._check_unchanged()
        results, changed = apart
        selection = self._evaluator.selection
        known = [
            before if given is None else given
            for before, given in zip(shardings, equations.in_shardings(traced), strict=True)
        ]
        specs = self._specs(leaves, known)
        placed = [*known, *jax.tree.leaves(self._in_specs)]
        workers = workers_of(selection.axes[0], placed, traced)
        bound = equations.bound_axes(traced) | set(compat.axes_in_scope())
        selection.check_bound(bound.union(workers.mesh.axis_names if workers else ()))
        likely: dict[int, PartitionSpec] = {}
        if workers is not None:
            rows = [RowHint(rows_of_spec(spec or (), workers.axis)) for spec in specs]
            traced, _ = Marker(workers).program(traced, rows)
            if len(workers.mesh.axis_names) > 1:
                shapes = [each.shape for each in traced.out_avals]
                likely = specs_alike(results, shapes, leaves, specs)
        program = StepProgram(
            traced,
            input_specs={i: spec for i, spec in enumerate(specs) if spec is not None},
            output_specs=specs_of_shardings(equations.out_shardings(traced)),
            likely_specs=likely,
        )
        program, continued = origins_of(program)
        program = chosen(program, selection, continued)
        made, sums = schedule(program, selection, opens_all=self._is_jitted)
        groups = tuple(each for each in sums if isinstance(each, Reduce))
        exact = tuple(each for each in sums if isinstance(each, KeptSum))
        if not (self._missing_ok or groups):
            raise ValueError(_nothing_to_compress(selection, exact))
        inside = next((e.around.inside for e in groups if e.around.inside is not None), None)
        if self._evaluator.request.measures and inside is not None:
            raise ValueError(
                "with_metrics=True, but the step has sums to compress inside of "
                f"{inside.primitive.name!r}, from {equations.place(inside)}, which has no such "
                "result. Write the sum there with dq.pmean(..., with_metrics=True), or leave "
                "with_metrics out."
            )
        donated = tuple(equations.donated_inputs(traced))
        return _Program(made, groups, exact, results, changed, donated)

    def _specs(self, leaves: Leaves, shardings: Sequence[Any]) -> list[PartitionSpec | None]:
        """Return the specs of the arrays of arguments: those of the user, or of shardings."""
        of_shardings = specs_of_shardings(shardings)
        known = [of_shardings.get(number) for number in range(len(shardings))]
        if self._in_specs is None:
            return known
        numbers, _ = jax.tree.unflatten(leaves.structure, range(len(leaves.kinds)))
        given = leaf_specs(numbers, self._in_specs)
        keywords = [None] * (len(leaves.kinds) - len(given))
        of_arrays = leaves.of_arrays([*given, *keywords])
        return [*of_arrays, *known[len(of_arrays) :]]

    def _check_unchanged(self) -> None:
        """Check that a trace has left no array in the object of the step."""
        owner = self._instance
        if owner is None:
            owner = getattr(self._fun, "__self__", self._fun)
        held = getattr(owner, "__dict__", {}).values()
        if any(isinstance(leaf, jax.core.Tracer) for each in held for leaf in _leaves_of(each)):
            raise TypeError(
                "The step assigns arrays to attributes of an object, such as self.state, which "
                "would happen only while it is traced. Return them, or compress the function "
                "inside that takes and returns them."
            )


def _leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value; none of a dictionary whose keys have no order."""
    try:
        return jax.tree.leaves(value)
    except ValueError:
        return []


def _nothing_to_compress(selection: Selection, found: Sequence[KeptSum]) -> str:
    lines = [
        f"\n  {each.operation} of {each.dtype.name}{list(each.shape)} over {each.axes}, "
        f"{each.source or 'of an unknown line'}: {why}"
        for each, why, _, _ in found
    ]
    what = "These stay exact:" + "".join(lines) if found else "It has no sum over a named axis."
    return (
        f"The step has no sum over axis_name={selection.axis_name!r} to compress. {what}\nGive the "
        "name of an axis over which it sums gradients: a manual axis of jax.shard_map or jax.pmap "
        "in the step, or one over which the rows of its batch are split. Where no argument has a "
        "sharding, as inside of another jax.jit, give in_specs= of NamedShardings, or of "
        "PartitionSpecs under jax.set_mesh. Take gradients inside of the "
        "step: those of a compressed function would not be compressed. If they are arguments of "
        "the step, give only=lambda s: s.origin == 'other', which compresses what no backward pass "
        "has made. Give missing_ok=True if this step may stay as it is."
    )
