"""Train steps that others wrote, with their sums over an axis compressed."""

import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dynamiq_jax._api._held import ARRAYS, Held, Programs, check_unchanged
from dynamiq_jax._api.sum_report import CompressReport, report_of
from dynamiq_jax._buckets.axes import AxisName
from dynamiq_jax._inputs.checks import check_key
from dynamiq_jax._inputs.options import Options, resolve
from dynamiq_jax._inputs.policy import Rules
from dynamiq_jax._plan import recording
from dynamiq_jax._rewriting.evaluate import Evaluation
from dynamiq_jax._rewriting.inner import specs_of_shardings
from dynamiq_jax._rewriting.origins import origins_of
from dynamiq_jax._rewriting.schedule import Scheduler, Surroundings
from dynamiq_jax._rewriting.steps import EvaluationSchedule, KeptSum
from dynamiq_jax._rewriting.sums import DEFAULT_OPERATIONS, Operation, Selection, Sum
from dynamiq_jax.methods import DynamiQ, Method
from dynamiq_jax.topologies import Topology
from pallas_kernels._jax import compat, equations
from pallas_kernels._jax.compat import override
from pallas_kernels._jax.own_thread import is_traced


def compress(
    fun: Callable[..., Any],
    axis_name: AxisName,
    *,
    key: Callable[..., Array] | None = None,
    method: Method | str | Rules = DynamiQ(),
    topology: Topology | str = "ring",
    only: Callable[[Sum], bool] | None = None,
    operations: tuple[Operation, ...] = DEFAULT_OPERATIONS,
    specs: Any = None,
    missing_ok: bool = False,
    options: Options = Options(),
) -> "CompressedStep":
    """Compress the sums over a mesh axis in a train step, which stays as it is.

        step = dq.compress(step, "data")

    The step is traced, and each `psum`, `pmean` and `psum_scatter` over the axis is replaced,
    wherever it is: in `shard_map` or `pmap`, with `check_vma` True or False, in `jit`, `scan`,
    `while_loop`, `cond` and `checkpoint`. So are the sums that `jax.grad` adds for parameters that
    are the same on all workers. Sums that do not need each other are one group, which is one
    compressed collective, as `dq.psum` of a tree.

    Floating sums of gradients with at least `options.exact_below` elements are compressed: of
    results of a backward pass, also in another form, rounded, clipped, masked, scaled by numbers or
    added. These stay exact: sums of anything else, such as statistics, products of gradients, and
    changes of parameters; sums with which a backward pass goes on; sums over groups of an axis; and
    sums over other axes alone. Zeros, as of frozen parameters, are not sent.

    Args:
      fun: train step, or any function that JAX can trace: plain, the result of `jax.jit`,
        `jax.pmap` or `jax.shard_map`, a method, or an object that is called. It has a manual axis
        of that name, or is called where there is one.
      axis_name: one axis, or several with the slowest link first; see `psum`. A sum over more axes
        is exact over the others first.
      key: function of the arguments of the step that returns a PRNG key, the same on all workers
        and a different one at every step. None: the key of each sum follows from a sample of its
        terms on all workers, one coordinate of 251 and all of small ones, for which they add four
        bytes. A step whose sample repeats itself, as with a learning rate of 0, repeats its
        rounding noise then.
      method: compression method, or its name, or a policy; see `psum`. The paths of leaves are
        "sum_0", "sum_1" and so on.
      topology: route of the chunks; see `psum`.
      only: function of a `dq.Sum` to whether it may be compressed, in place of the rule for
        gradients: the default is `lambda s: s.origin == "gradient"`, and gathers of anything.
      operations: functions of `jax.lax` that are replaced: add "all_gather" to compress gathers.
      specs: how the terms are split over axes that the compiler manages inside the map; see
        `psum`: a `PartitionSpec` for all, or a function of a `dq.Sum`. None: those of the
        parameters that the sums update, where their shardings are known.
      missing_ok: True: a step without a sum to compress stays as it is, in place of an error. So
        all maps of a program can be wrapped, such as by a function in place of `jax.pmap`. `report`
        still lists the sums of each.
      options: sums that stay exact, and the size of buckets; see `psum`.

    Returns:
      A function with the arguments and results of `fun`. If `fun` is the result of `jax.jit`, so is
      this one, with the same donated and static arguments and shardings; otherwise it is compiled
      when it is called outside of a trace, for each set of arguments that are no arrays, and of
      values that its object holds as attributes: numbers, text, arrays and other objects. The last
      eight of these programs are kept for arguments of one kind. One more is a warning. A change
      inside of an array or of another object is not seen, but for dataclasses. Its method `report`
      lists all sums of the step, and `lower` and `trace` are those of `jax.jit`.

    Raises:
      TypeError: `fun` or an argument is of the wrong kind; flax.nnx objects as arguments.
      ValueError: when it is called: no sum can be compressed, unless `missing_ok`; the step lacks
        one axis of several; a sum is in an equation that cannot be made anew; a method that carries
        state; and as `psum`.

    >>> import jax, jax.numpy as jnp
    >>> def step(weights, batch):
    ...     gradient = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    ...     return weights - 0.1 * jax.lax.pmean(gradient, "data")
    >>> step = compress(step, "data")
    >>> weights, batches = jnp.ones((64, 64)), jnp.ones((2, 8, 64))
    >>> mapped = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    >>> jax.jit(mapped)(weights, batches).shape
    (2, 64, 64)
    """
    if not callable(fun):
        raise TypeError(f"fun={fun!r:.80} cannot be called. Give a train step.")
    if key is not None and not callable(key):
        raise TypeError(
            f"key={key!r:.80} cannot be called. Give a function of the arguments of the step, such "
            "as lambda state, batch: jax.random.fold_in(jax.random.key(0), state.step), or None."
        )
    compression = resolve(method, topology, options, stateless="compress")
    selection = Selection(axis_name, options.exact_below, only, operations)
    evaluation = Evaluation(selection, compression, specs)
    return CompressedStep(fun, key, evaluation, missing_ok=missing_ok)


# Of the leaves of arguments: None where it is not known. Empty: none is known.
_Specs = tuple[PartitionSpec | None, ...]


class _Program(NamedTuple):
    """Step that is traced and scheduled for some arguments."""

    schedule: EvaluationSchedule
    exact: list[KeptSum]
    structure: Any  # of the results
    donated: tuple[int, ...]  # numbers of flat arguments


class CompressedStep:
    """Train step with compressed sums: the result of `compress`."""

    def __init__(
        self, fun: Callable[..., Any], key: Any, evaluation: Evaluation, *, missing_ok: bool
    ):
        self._key = key
        self._missing_ok = missing_ok
        self._evaluation = evaluation
        self._compiled: dict[Hashable, Programs] = {}  # by kind of arguments
        self._given = fun if equations.is_jitted(fun) else None
        self._jitted: dict[_Specs, Any] = {}  # like the given one
        self._fun = fun if self._given is None else equations.placed(fun)
        functools.update_wrapper(self, fun, updated=())  # attributes of an object stay its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step with its sums compressed."""
        leaves = jax.tree.leaves((args, kwargs))
        if self._given is not None:
            return self._like_given(leaves)(*args, **kwargs)
        if is_traced() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._traced(args, kwargs, _specs_of(leaves))
        function, arrays = self._function(args, kwargs)
        return function(*arrays)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an object, for a step that is an attribute of its class."""
        return self if instance is None else functools.partial(self, instance)

    @override
    def __repr__(self) -> str:
        axis_name = self._evaluation.selection.axis_name
        return f"dq.compress({self._fun!r}, {axis_name!r})"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the step for arguments, as the method of `jax.jit` does."""
        return self.trace(*args, **kwargs).lower()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace the step for arguments, as the method of `jax.jit` does."""
        if self._given is not None:
            return self._like_given(jax.tree.leaves((args, kwargs))).trace(*args, **kwargs)
        function, arrays = self._function(args, kwargs)
        return function.trace(*arrays)

    def report(self, *args: Any, **kwargs: Any) -> CompressReport:
        """List the sums of the step, with their bytes and the reason of those that stay exact.

        Nothing is run. Call it where the step is called: inside of the map, if the step is a
        function of one worker.

        Args:
          *args: arguments of the step, arrays or `jax.ShapeDtypeStruct`.
          **kwargs: keyword arguments of the step.
        """
        return self._report(self._program(_Arguments.of(args, kwargs)))

    def _report(self, program: _Program) -> CompressReport:
        return report_of(tuple(program.schedule.groups()), program.exact, self._evaluation)

    def _like_given(self, leaves: Sequence[Any]) -> Any:
        """Return a function with the settings of a step that was jitted, for arguments.

        Shardings of arrays are not known inside of a trace. So each set of them has a function.
        """
        specs = _specs_of(leaves)
        if specs not in self._jitted:

            @functools.wraps(equations.unjitted(self._given))
            def step(*args: Any, **kwargs: Any) -> Any:
                return self._traced(args, kwargs, specs)

            self._jitted[specs] = equations.jit_like(step, self._given)
        return self._jitted[specs]

    def _traced(self, args: Any, kwargs: Any, specs: "_Specs") -> Any:
        """Run the step inside of a trace."""
        arguments = _Arguments.of(args, kwargs, specs)
        program = self._program(arguments)
        recording.record_step(lambda: self._report(program))
        return self._run(program, arguments)

    def _function(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the compiled step for arguments, as a function of those that are arrays."""
        arguments = _Arguments.of(args, kwargs)
        objects = (getattr(self._fun, "__self__", self._fun), *arguments.others)
        held = arguments.held.beside(Held.by(objects))
        programs = self._compiled.get(arguments.kind, Programs())
        function = programs.get(held)
        if function is None:
            program = self._program(arguments, objects)

            def step(*arrays: Any) -> Any:
                recording.record_step(lambda: self._report(program))
                return self._run(program, arguments._replace(arrays=arrays))

            step.__name__ = getattr(self._fun, "__name__", "step")
            function = jax.jit(step, donate_argnums=program.donated)
            if arguments.kind is not None:
                programs.add(held, function)
                self._compiled[arguments.kind] = programs
        return function, arguments.arrays

    def _run(self, program: "_Program", arguments: "_Arguments") -> Any:
        args, kwargs = arguments.rebuilt(arguments.arrays)
        key = None
        if self._key is not None and any(program.schedule.groups()):
            key = check_key(self._key(*args, **kwargs), ())
        results = self._evaluation.run(program.schedule, key, *arguments.arrays)
        return jax.tree.unflatten(program.structure, results)

    def _program(self, arguments: "_Arguments", objects: Sequence[Any] = ()) -> _Program:
        """Trace the step and schedule it.

        Args:
          arguments: arguments of the step.
          objects: objects to which the step must not assign arrays.

        Raises:
          TypeError: the step assigns an array to an attribute.
          ValueError: there is no sum to compress.
        """

        def flat(*arrays: Any) -> Any:
            args, kwargs = arguments.rebuilt(arrays)
            return self._fun(*args, **kwargs)

        try:
            traced, results = jax.make_jaxpr(flat, return_shape=True)(*arguments.arrays)
        except jax.errors.JAXTypeError as error:
            name = getattr(self._fun, "__name__", "the step")
            error.add_note(
                f"dq.compress traces all of {name}, as jax.jit does: no array has values there. "
                "Move what needs them, such as float(loss), behind the step."
            )
            raise
        check_unchanged(objects)
        selection = self._evaluation.selection
        selection.check_bound(equations.bound_axes(traced) | set(compat.axes_in_scope()))
        scheduler = Scheduler(selection)
        around = Surroundings(input_specs=arguments.input_specs)
        schedule = scheduler.schedule(origins_of(equations.without_unused(traced)), around)
        if not (self._missing_ok or any(schedule.groups())):
            raise ValueError(_nothing_to_compress(selection, scheduler.exact))
        donated = tuple(equations.donated_inputs(traced))
        return _Program(schedule, scheduler.exact, jax.tree.structure(results), donated)


class _Arguments(NamedTuple):
    """Arguments of a step, apart by arrays and others."""

    arrays: tuple[Any, ...]
    others: tuple[Any, ...]  # values that a trace takes as they are, such as flags
    are_arrays: tuple[bool, ...]  # by leaf
    structure: Any
    specs: _Specs  # by leaf

    @classmethod
    def of(cls, args: Any, kwargs: Any, specs: _Specs | None = None) -> "_Arguments":
        """Take arguments apart.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          specs: specs of the leaves, where those of the arrays are not known.

        Raises:
          TypeError: a flax.nnx object, whose change inside of the step would be lost.
        """
        nnx = sys.modules.get("flax.nnx")
        objects = () if nnx is None else (getattr(nnx, "Pytree", nnx.Object),)
        leaves, structure = jax.tree.flatten(
            (args, kwargs), is_leaf=lambda node: isinstance(node, objects)
        )
        for leaf in leaves:
            if isinstance(leaf, objects):
                raise TypeError(
                    f"An argument of the step is the flax.nnx object {type(leaf).__name__}, whose "
                    "changes inside of the step would be lost. Give and return its state: "
                    "graphdef, state = nnx.split(object) outside, nnx.merge(graphdef, state) and "
                    "nnx.state(object) inside of the step."
                )
        are_arrays = tuple(isinstance(leaf, ARRAYS) for leaf in leaves)
        arrays = tuple(leaf for leaf, is_array in zip(leaves, are_arrays, strict=True) if is_array)
        others = tuple(
            leaf for leaf, is_array in zip(leaves, are_arrays, strict=True) if not is_array
        )
        specs = _specs_of(leaves) if specs is None else specs
        return cls(arrays, others, are_arrays, structure, specs)

    @property
    def kind(self) -> Hashable:
        """All that a trace depends on, but for `held`; None if a value cannot be compared."""
        types = tuple(
            array if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array)
            for array in self.arrays
        )
        try:
            hash(self.others)
        except TypeError:
            return None
        return self.structure, self.are_arrays, types, tuple(map(type, self.others)), self.specs

    @property
    def held(self) -> Held:
        """Arguments that are no arrays."""
        if not self.others:
            return Held((), ())
        leaves = jax.tree_util.tree_leaves_with_path(
            jax.tree.unflatten(self.structure, self.are_arrays)
        )
        names = [_name_of(*path) for path, is_array in leaves if not is_array]
        return Held(tuple(names), self.others)

    @property
    def input_specs(self) -> dict[int, PartitionSpec]:
        """Specs of arrays that are known, by their numbers."""
        of_arrays = itertools.compress(self.specs, self.are_arrays)
        return {i: spec for i, spec in enumerate(of_arrays) if spec is not None}

    def rebuilt(self, arrays: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keyword arguments with other arrays."""
        of_kind = {True: iter(arrays), False: iter(self.others)}
        leaves = [next(of_kind[is_array]) for is_array in self.are_arrays]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return args, kwargs


def _name_of(part: Any, argument: Any, *inside: Any) -> str:
    """Return the name of a leaf of positional arguments, the first part, or of others."""
    name = repr(argument.key) if part.idx else argument.idx
    return f"argument {name}{jax.tree_util.keystr(inside)}"


def _specs_of(leaves: Sequence[Any]) -> _Specs:
    """Return the specs of arrays, from which those of sums can follow; none if none is known."""
    specs = tuple(map(_spec_of, leaves))
    return specs if any(spec is not None for spec in specs) else ()


def _spec_of(leaf: Any) -> PartitionSpec | None:
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return _of_several_axes(sharding) if isinstance(sharding, NamedSharding) else None


@functools.lru_cache(maxsize=1024)
def _of_several_axes(sharding: NamedSharding) -> PartitionSpec | None:
    """Return the spec of a sharding whose mesh has axes beside that of workers."""
    has_several = sum(size > 1 for size in sharding.mesh.shape.values()) > 1
    return specs_of_shardings([sharding]).get(0) if has_several else None


def _nothing_to_compress(selection: Selection, found: list[KeptSum]) -> str:
    lines = [
        f"\n  {each.operation} of {each.dtype.name}{list(each.shape)} over {each.axes}, "
        f"{each.source or 'of an unknown line'}: {why}"
        for each, why, _, _ in found
    ]
    what = "These stay exact:" + "".join(lines) if found else "It has no sum over a named axis."
    return (
        f"The step has no sum over axis_name={selection.axis_name!r} to compress. {what}\nGive the "
        "name of a manual axis of jax.shard_map or jax.pmap in the step, over which it sums "
        "gradients. Where the compiler places the sums, as in jax.jit with shardings alone, use "
        "dq.data_parallel. Take gradients inside of the step: those of a compressed function would "
        "not be compressed. If they are arguments of the step, give only=lambda s: s.origin == "
        "'other', which compresses what no backward pass has made. Give missing_ok=True if this "
        "step may stay as it is."
    )
