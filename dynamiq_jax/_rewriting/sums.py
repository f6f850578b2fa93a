"""Sums over mesh axes in a traced program, and the choice of those to compress."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from dynamiq_jax._buckets.axes import axis_names
from dynamiq_jax._buckets.scopes import labels
from dynamiq_jax._core.validation import check_choice
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation

Operation = Literal["psum", "psum_scatter", "all_gather"]
Differentiation = Literal["forward", "backward"]
SumOrigin = Literal["gradient", "forward", "backward", "other"]

# Primitives by the name of the function of `jax.lax` that makes them. `jax.grad` adds the
# invariant ones under check_vma=True.
OPERATIONS: dict[str, Operation] = {
    "psum": "psum",
    "psum_invariant": "psum",
    "sum_over_rows": "psum",
    "reduce_scatter": "psum_scatter",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
}
DEFAULT_OPERATIONS: tuple[Operation, ...] = ("psum", "psum_scatter")

SMALL = "fewer elements than exact_below"
NOT_FLOATING = "not floating"
SYMBOLIC = "its shape is symbolic"
NOT_CHOSEN = "only= returned False"
ZEROS = "its terms are zeros, which are not sent"
FORWARD = "in the forward pass of what is differentiated"
CONTINUED = "a backward pass goes on with its result"
NO_GRADIENT: dict[SumOrigin, str] = {
    "backward": CONTINUED,
    "forward": "its terms are from a forward pass",
    "other": "its terms are from no backward pass",
}
MIXED = "its terms are made of gradients, and are none"


@dataclasses.dataclass(frozen=True)
class Sum:
    """Sum of one array over mesh axes, in a step that was traced.

    A gather of parts over an axis is described alike.
    """

    operation: Operation  # function of `jax.lax`: a pmean is a psum and a division
    axes: tuple[str, ...]  # names of the axes
    shape: tuple[int, ...]  # of the array on each worker
    dtype: np.dtype[Any]
    source: str  # file, line and function; "" if not known
    scopes: str  # names that JAX gave the equation: `jax.named_scope` and transformations
    # Pass of `jax.grad` that it is in; None outside of both, as that of a `pmean` of gradients.
    differentiation: Differentiation | None
    # Where its terms come from: "gradient", from a backward pass, wherever the sum is; "backward",
    # too, but a backward pass goes on with the sum; "forward", from a forward pass; "other".
    origin: SumOrigin


sum_over_rows = Primitive("sum_over_rows")
sum_over_rows.def_abstract_eval(lambda *operands, equation, **params: equation.outvars[0].aval)


def _as_it_was(*operands: Any, equation: Equation, **params: Any) -> Any:
    return equations.bound(equation, operands)[0]


mlir.register_lowering(sum_over_rows, mlir.lower_fun(_as_it_was, multiple_results=False))

_TRANSFORMED = re.compile(r"\b(jvp|transpose)\(")


def differentiation_of(scopes: str) -> Differentiation | None:
    """Return the pass of a differentiation that an equation is in, from the names of its scopes.

    The outermost transformation decides. What a backward pass computes again, under
    `jax.checkpoint`, is a forward pass.
    """
    if "rematted_computation" in scopes:
        return "forward"
    first = _TRANSFORMED.search(scopes)
    if first is None:
        return None
    return "forward" if first[1] == "jvp" else "backward"


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rule for the sums of a step that are compressed."""

    axis_name: str | tuple[str, ...]
    exact_below: int
    only: Callable[[Sum], Any] | None = None
    operations: tuple[Operation, ...] = DEFAULT_OPERATIONS

    def __post_init__(self) -> None:
        axis_names(self.axis_name)  # raises if they are none
        if self.only is not None and not callable(self.only):
            raise TypeError(
                f"only={self.only!r:.80} cannot be called. Give a function of a dq.Sum to True or "
                "False, such as lambda s: s.origin == 'gradient'."
            )
        if isinstance(self.operations, str):
            raise TypeError(f"operations={self.operations!r} is one name. Give a tuple of names.")
        for operation in self.operations:
            check_choice("operations", operation, tuple(dict.fromkeys(OPERATIONS.values())))

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return axis_names(self.axis_name)

    def check_bound(self, bound: Collection[str]) -> None:
        """Raise ValueError for one axis of several that does not exist in or around the step."""
        missing = [name for name in self.axes if name not in bound]
        if 0 < len(missing) < len(self.axes):
            raise ValueError(
                f"axis_name={self.axis_name!r}: {missing[0]!r} is not an axis of the step, whose "
                f"axes are {tuple(sorted(bound))}. Give manual axes of its maps alone, the slowest "
                "link first."
            )

    def why_exact(self, each: Sum, params: Mapping[str, Any]) -> str | None:
        """Return why the sum of an equation with `params` stays as it is; None if it is to be
        compressed.
        """
        over = "over " + ", ".join(map(repr, each.axes))
        if labels(each.scopes):
            return "a part of a collective that is compressed already"
        if each.operation not in self.operations:
            return f"{each.operation} is not among operations={self.operations}"
        if not set(each.axes) & set(self.axes):
            return over
        if self.axes[0] not in each.axes:
            return f"{over}, without the slow axis {self.axes[0]!r}"
        if each.operation != "psum" and len(each.axes) > 1:
            return f"{each.operation} over several axes"
        if params.get("axis_index_groups") is not None:
            return "over groups of an axis (axis_index_groups)"
        if not jnp.issubdtype(each.dtype, jnp.floating):
            return NOT_FLOATING
        if not all(isinstance(size, int) for size in each.shape):
            return SYMBOLIC
        if self.is_small(each, params):  # one that a backward pass waits for joins no group
            return CONTINUED if each.origin == "backward" else SMALL
        unsplit: str | None = params.get("why_exact")  # of a contraction
        if self.only is not None:
            return unsplit if self.only(each) else NOT_CHOSEN
        if each.differentiation == "forward":
            return FORWARD
        # Gathers, which `operations` has to name, are of anything, such as updated parameters.
        is_any = each.operation == "all_gather" and each.origin != "backward"
        return unsplit if is_any else NO_GRADIENT.get(each.origin, unsplit)

    def is_small(self, each: Sum, params: Mapping[str, Any]) -> bool:
        """Return whether a sum of an equation with `params` has too few elements."""
        parts = params["axis_size"] if each.operation == "all_gather" else 1
        return math.prod(each.shape) * parts < self.exact_below


def over_axes(equation: Equation) -> tuple[Operation, tuple[str, ...]] | None:
    """Return the operation of an equation and its axes; None if it is no sum over named axes."""
    if resharded := equations.sums_of_reshard(equation):
        return "psum", resharded
    operation = OPERATIONS.get(equation.primitive.name)
    if operation is None:
        return None
    axes = axes_of(equation)  # numbers are those of a vmap without a name
    is_named = bool(axes) and all(isinstance(name, str) for name in axes)
    return (operation, axes) if is_named else None


def as_written(equation: Equation) -> Equation:
    """Return the equation of the program that a sum over rows computes, or the equation itself."""
    contraction: Equation = equation.params["equation"] if is_over_rows(equation) else equation
    return contraction


def axes_of(equation: Equation) -> tuple[Any, ...]:
    """Return the axes among the parameters of an equation."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def is_over_rows(equation: Equation) -> bool:
    """Return whether an equation is a contraction of rows that the compiler splits."""
    return equation.primitive is sum_over_rows
