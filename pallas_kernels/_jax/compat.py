"""Differences between JAX and Python versions, and with and without `check_vma=True`."""

import functools
import importlib
import importlib.util
import sys
import traceback
import warnings
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import jax
from jax import Array, lax
from jax.extend.core import Primitive, unsafe_get_axis_names_DO_NOT_USE
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, PartitionSpec

if sys.version_info >= (3, 12):
    from typing import override as override
else:

    def override(method: Any) -> Any:
        """Mark a method that overrides one of a base class, as `typing.override` does."""
        return method


Tree = TypeVar("Tree")
Described = jax.ShapeDtypeStruct | jax.core.ShapedArray


def varying_axes(value: Array | Described) -> frozenset[str]:
    """Return the mesh axes over which a value, or one that a shape describes, is known to vary.

    They are none without `check_vma`.
    """
    aval = value if isinstance(value, Described) else jax.typeof(value)
    kind = getattr(aval, "manual_axis_type", None)  # tokens and references have none
    return frozenset() if kind is None else kind.varying


def axes_in_scope() -> tuple[str, ...]:
    """Return the names of the axes over which collectives are possible here."""
    return tuple(name for name in unsafe_get_axis_names_DO_NOT_USE() if isinstance(name, str))


def unreduced_axes(value: Array) -> frozenset[str]:
    """Return the manual axes over which a value is a sum that has not been done: since JAX 0.11."""
    return getattr(getattr(jax.typeof(value), "manual_axis_type", None), "unreduced", frozenset())


def partitions(spec: PartitionSpec) -> tuple[Any, ...]:
    """Return the axes of each dimension. JAX 0.12 does not iterate over specs of unreduced ones."""
    return tuple(getattr(spec, "partitions", spec))


def tracks_varying(axis_name: str) -> bool:
    """Return whether types record the axes over which values vary, as under `check_vma=True`."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def match_varying(values: Tree, reference: Array | Described, *others: Array | Described) -> Tree:
    """Mark values as varying over the axes of references, as a loop carry has to be."""
    axes = varying_axes(reference).union(*map(varying_axes, others))

    def mark(value: Array) -> Array:
        missing = tuple(axes - varying_axes(value))
        return lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(mark, values) if axes else values


def vary_over(values: Tree, axis_names: tuple[str, ...]) -> Tree:
    """Mark constants as varying over axes, as the values that replace them will be."""
    axes = tuple(name for name in axis_names if tracks_varying(name))
    if not axes:
        return values
    return jax.tree.map(lambda value: lax.pcast(value, axes, to="varying"), values)


def same_over(values: Tree, axis_name: str) -> Tree:
    """Mark values as the same over an axis, for which the caller vouches.

    JAX infers this of sums and gathers, but not of a state that a program got back: its type says
    that every worker has its own, and so would that of all results.
    """

    def mark(value: Array) -> Array:
        if axis_name not in varying_axes(value):
            return value
        return _same_over.bind(value, axis_name=axis_name)

    return jax.tree.map(mark, values)


_same_over = Primitive("same_over")
_same_over.def_impl(lambda value, axis_name: value)


@_same_over.def_abstract_eval
def _(aval: Any, axis_name: str) -> Any:
    before = aval.manual_axis_type
    return aval.update_manual_axis_type(before.update(varying=before.varying - {axis_name}))


mlir.register_lowering(_same_over, lambda context, value, axis_name: [value])
batching.primitive_batchers[_same_over] = lambda values, dimensions, axis_name: (
    _same_over.bind(*values, axis_name=axis_name),
    dimensions[0],
)


def all_gather(value: Array, axis_name: str, *, tiled: bool = False) -> Array:
    """Gather like `lax.all_gather`, with a result that may be returned with `out_specs=P()`."""
    to = "invarying" if tracks_varying(axis_name) else "varying"
    return lax.all_gather(value, axis_name, tiled=tiled, to=to)


def shape_like(shape: tuple[int, ...], dtype: Any, reference: Array) -> jax.ShapeDtypeStruct:
    """Describe the result of a kernel: a shape that varies over the axes of `reference`."""
    kind: Any = jax.typeof(reference).manual_axis_type
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=kind)


def has_triton() -> bool:
    """Return whether Pallas can lower to Triton, which is deprecated since JAX 0.11."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def has_mosaic_gpu() -> bool:
    """Return whether Pallas can lower and interpret our Mosaic GPU kernels.

    JAX 0.10 has neither square roots nor an interpreter there. Later versions need absl, which JAX
    does not install.
    """
    return jax.__version_info__ >= (0, 11) and importlib.util.find_spec("absl") is not None


def mosaic_tpu_views_vectors() -> bool:
    """Return whether a Mosaic TPU kernel can view lines of memory as a vector: not in JAX 0.10."""
    return jax.__version_info__ >= (0, 12)


class DistributedProcess(NamedTuple):
    """This process among those that `jax.distributed` joined."""

    client: Any  # of the coordination service
    process: int  # number of this process
    num_processes: int


_SERVICE = "The coordination service of jax.distributed"
# Methods of its client that the agreement of processes calls.
_CLIENT = ("blocking_key_value_get", "key_value_delete", "key_value_dir_get", "key_value_set")


def job() -> DistributedProcess | None:
    """Return this process among those of its job; None if it is the only one.

    JAX has no public function that returns the client of the coordination service. Where another
    version of JAX has it elsewhere, a warning says that nothing is compared.
    """
    try:
        state = importlib.import_module("jax._src.distributed").global_state
        client, process, number = state.client, state.process_id, state.num_processes
    except (ImportError, AttributeError) as error:
        _warn_that_nothing_is_compared(_SERVICE, f"{error}")
        return None
    if client is None or number < 2:
        return None
    if missing := [name for name in _CLIENT if not hasattr(client, name)]:
        _warn_that_nothing_is_compared(_SERVICE, f"the client has no {', '.join(missing)}")
        return None
    return DistributedProcess(client, process, number)


@functools.cache  # once
def _warn_that_nothing_is_compared(what: str, reason: str) -> None:
    """Warn of a private name of JAX that this version does not have, if there are processes."""
    if jax.process_count() == 1:
        return
    warnings.warn(
        f"{what} was not found in JAX {jax.__version__} ({reason}). It is not checked that all "
        "processes run the same collective: if they do not, they hang or their results are wrong. "
        "Install a version of dynamiq-jax that supports this version of JAX, or give "
        "dq.Compression(check_agreement=False) to all collectives.",
        stacklevel=3,
    )


def may_hold_custom_calls(context: Any) -> bool:
    """Return whether the program that is lowered may hold custom calls of this process.

    XLA cannot partition a custom call, so that its arrays have to be those of one device: it is
    alone, or all axes of the mesh are manual. A program that is exported may run elsewhere. False
    where this version of JAX has other names.
    """
    module = context.module_context
    try:
        axes, is_exported = module.axis_context, module.lowering_parameters.for_export
        manual = getattr(axes, "manual_axes", None)
        of_one = axes.num_devices == 1 if manual is None else manual == {*axes.mesh.axis_names}
    except AttributeError:
        return False
    return of_one and not is_exported


def only_traces() -> bool:
    """Return whether the call that traces here, such as `jit(f).lower`, runs nothing of it."""
    calls = _calls_of_jit()
    return bool(calls) and calls[-1].f_code.co_name == _TRACES  # the outermost one decides


def running_call() -> FrameType | None:
    """Return the call of a jitted function that runs what is traced or compiled here, by its frame.

    None where nothing shows one: where a program is only traced, or compiled by
    `jit(f).lower(...).compile()`.
    """
    calls = _calls_of_jit()
    return calls[-1] if calls and calls[-1].f_code.co_name == _RUNS else None


def is_within_trace() -> bool:
    """Return whether a call of a jitted function is evaluated while another one is traced."""
    return len(_calls_of_jit()) > 1


_RUNS, _TRACES = "cache_miss", "jit_trace"  # names of functions in JAX


def _calls_of_jit() -> list[FrameType]:
    """Return the frames in which JAX handles calls of jitted functions, the innermost first.

    The names of JAX's own functions show them. None where this version of JAX has other names.
    """
    return [
        frame
        for frame, _ in traceback.walk_stack(sys._getframe())
        if frame.f_code.co_name in (_RUNS, _TRACES)
        if frame.f_globals["__name__"] == "jax._src.pjit"
    ]


def concrete_mesh() -> Mesh | None:
    """Return the mesh of `jax.set_mesh`, also while tracing, where `jax.sharding.get_mesh` raises.

    None if there is none. Where another version of JAX has it elsewhere, a warning says that
    collectives over a part of the devices are not compared.
    """
    try:
        mesh = importlib.import_module("jax._src.mesh").get_concrete_mesh()
    except (ImportError, AttributeError) as error:
        _warn_that_nothing_is_compared("The mesh of jax.set_mesh", f"{error}")
        return None
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None
