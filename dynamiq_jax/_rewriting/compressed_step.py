"""Train step with compressed sums: traced, scheduled, and compiled for each kind of arguments."""

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from dynamiq_jax._inputs.checks import check_key
from dynamiq_jax._inputs.request import Request
from dynamiq_jax._plan import recording
from dynamiq_jax._rewriting.arguments import Leaves
from dynamiq_jax._rewriting.evaluate import evaluate
from dynamiq_jax._rewriting.program import ScheduledStep, collector_paused, scheduled
from dynamiq_jax._rewriting.report import CompressReport, report_of
from dynamiq_jax._rewriting.sums import Selection
from dynamiq_jax._rewriting.unreduced import Metrics
from pallas_kernels._jax import equations
from pallas_kernels._jax.compat import override
from pallas_kernels._jax.own_thread import is_traced

_MANY = 8  # programs of a step; one more is a warning
_MOST = 64  # programs that are kept, with the constants of their arguments


# What a program returns: the leaves of the results, new arrays of objects, and metrics of the
# groups, if they are asked for.
_Results = tuple[Leaves, Any, list[Metrics] | None]


class CompressedStep:
    """Train step with compressed sums: the result of `compress`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        selection: Selection,
        request: Request,
        *,
        key: Callable[..., Any] | None = None,
        in_specs: Any = None,
        missing_ok: bool = False,
    ):
        self._fun = fun
        self._selection = selection
        self._request = request
        self._key = key
        self._in_specs = in_specs
        self._missing_ok = missing_ok
        # By all that a program depends on but types of arrays, for which `jax.jit` has programs.
        self._compiled: dict[Hashable, Any] = {}
        self._instance: Any = None  # whose method this step is, as an attribute of its class
        functools.update_wrapper(self, fun, updated=())  # attributes of an object stay its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step with its sums compressed."""
        args = self._with_instance(args)
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
        return f"dq.compress({self._fun!r}, {self._selection.axis_name!r})"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the step for arguments, as the method of `jax.jit` does."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the step for arguments, as the method of `jax.jit` does."""
        args = self._with_instance(args)
        leaves = self._leaves(args, kwargs)
        if self._is_jitted:
            return self._jitted(leaves).trace(*args, **kwargs)
        return self._function(leaves).trace(*leaves.arrays)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Return shapes and dtypes of the results, as the method of `jax.jit` does."""
        args = self._with_instance(args)
        leaves = self._leaves(args, kwargs)
        if self._is_jitted:
            return self._jitted(leaves).eval_shape(*args, **kwargs)
        return _tree_of(self._function(leaves).eval_shape(*leaves.arrays))

    def report(self, *args: Any, **kwargs: Any) -> CompressReport:
        """List the sums of the step, with their bytes and the reason of those that stay exact.

        Nothing is run. Call it where the step is called: inside of the map, if the step is a
        function of one worker.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: keyword arguments of the step.
        """
        leaves = self._leaves(self._with_instance(args), kwargs)
        return self._report(self._program(leaves, leaves.shardings))

    @property
    def _is_jitted(self) -> bool:
        return equations.is_jitted(self._fun)

    def _with_instance(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self._instance is None else (self._instance, *args)

    def _leaves(self, args: Any, kwargs: Any) -> Leaves:
        return Leaves.of((args, kwargs), is_jitted=self._is_jitted)

    def _report(self, program: ScheduledStep) -> CompressReport:
        return report_of(program.groups, program.exact, self._selection.axes, self._request)

    def _jitted(self, leaves: Leaves) -> Any:
        """Return the jitted step with compressed sums for arguments as they are placed."""
        # The function is traced with tracers, whose shardings are not known.
        shardings = leaves.of_leaves(leaves.shardings)

        def make() -> Any:
            @functools.wraps(equations.unjitted(self._fun))
            def step(*args: Any, **kwargs: Any) -> Any:
                within = self._leaves(args, kwargs)
                given = within.of_arrays(shardings)
                return self._finished(within, self._run(within, given, opens_all=True))

            return equations.jit_like(step, self._fun)

        return self._remembered(shardings, make)

    def _function(self, leaves: Leaves) -> Any:
        """Return the compiled step, as a function of the arrays of its arguments."""
        shardings = leaves.shardings

        def make() -> Any:
            first = self._program(leaves, shardings)
            programs = {leaves.types: first}  # another thread may be the first to trace
            empty = leaves.with_arrays(())

            def step(*arrays: Any) -> _Results:
                within = empty.with_arrays(arrays)
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
            made = self._compiled[kind] = make()
            if len(self._compiled) > _MOST:
                self._compiled.pop(next(iter(self._compiled)), None)
            return made
        return self._compiled[kind]

    def _run(
        self,
        leaves: Leaves,
        shardings: Sequence[Any],
        program: ScheduledStep | None = None,
        *,
        opens_all: bool = False,
    ) -> _Results:
        """Run the step inside of a trace, with a program for its arguments, or else traced here."""
        program = program or self._program(leaves, shardings, opens_all=opens_all)
        recording.record_step(lambda: self._report(program))
        key = None
        if self._key is not None and program.groups:
            (args, kwargs), _ = leaves.joined()
            key = check_key(self._key(*args, **kwargs), ())
        metrics: list[Metrics] | None = [] if self._request.measures else None
        with collector_paused():
            results = evaluate(
                program.schedule, self._request, key, *leaves.arrays, metrics=metrics
            )
        return *jax.tree.unflatten(program.results, results), metrics

    @staticmethod
    def _finished(leaves: Leaves, results: _Results) -> Any:
        """Return what the step returns, and give its objects their new arrays."""
        leaves.update(results[1])
        return _tree_of(results)

    def _program(
        self, leaves: Leaves, shardings: Sequence[Any], *, opens_all: bool = False
    ) -> ScheduledStep:
        """Trace the step and schedule it.

        Raises:
          TypeError: the step assigns an array to an attribute of its object.
          ValueError: there is no sum to compress.
        """
        selection, before = self._selection, self._held_tracers()
        program = scheduled(
            self._fun, leaves, shardings, self._in_specs, selection, opens_all=opens_all
        )
        self._check_unchanged(before)
        if not self._missing_ok:
            program.check_found(selection)
        if self._request.measures:
            program.check_measurable()
        return program

    def _held_tracers(self) -> list[Any]:
        """Return the traced arrays in the object of the step: of a trace around, or left there."""
        owner = self._instance
        if owner is None:
            owner = getattr(self._fun, "__self__", self._fun)
        held = getattr(owner, "__dict__", {}).values()
        leaves = (leaf for each in held for leaf in _leaves_of(each))
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]

    def _check_unchanged(self, before: Sequence[Any]) -> None:
        """Check that a trace has left no array in the object of the step."""
        if {*map(id, self._held_tracers())} - {*map(id, before)}:
            raise TypeError(
                "The step assigns arrays to attributes of an object, such as self.state, which "
                "would happen only while it is traced. Return them, or compress the function "
                "inside that takes and returns them."
            )


def _tree_of(results: _Results) -> Any:
    """Return what a step returns, and metrics if they are asked for."""
    returned, _, metrics = results
    tree, _ = returned.joined()
    return tree if metrics is None else (tree, metrics)


def _leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a value; none of a dictionary whose keys have no order."""
    try:
        return jax.tree.leaves(value)
    except ValueError:
        return []
