"""Traced programs, as all passes read them: equations with the values that they take and make."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from dynamiq_jax._rewriting.kinds import Origin
from dynamiq_jax._rewriting.rows import WorkerAxis
from dynamiq_jax._rewriting.sums import NOT_FLOATING, SMALL, ZEROS, Sum
from pallas_kernels._jax import equations
from pallas_kernels._jax.equations import Equation


class Variable(NamedTuple):
    """Variable of a program, in one call of it, or terms of the sum that it is."""

    var: Any
    call: int  # number of the call
    # Terms are made by an equation that holds a program, or by a linear one. With the first ones,
    # the total of the turns of a loop begins, and those of turns are as the loop stacks them.
    role: Literal["value", "terms", "first terms", "terms of turns"] = "value"

    @property
    def terms(self) -> "Variable":
        """Terms of the sum."""
        return self._replace(role="terms")


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """Constant of a program."""

    value: Any


Value = Variable | Constant


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Program of an equation, as it runs there. The outermost one is that of a step."""

    traced: Any
    nodes: tuple["Node", ...] = ()  # its equations, once they are read
    results: tuple[Origin, ...] = ()  # origins of its outputs, then
    times: int | None = 1  # that it runs in one call of the equation; None if that is not known
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of axes made manual
    mesh: Any = None  # in which they are
    inside: Equation | None = None  # outermost equation that holds it, where it is entered
    # Numbers of the inputs of the equation that are its inputs; None if they are not known, as are
    # its outputs then.
    inputs: Sequence[int] | None = None
    has_outputs: bool = True  # whether its outputs are those of the equation
    # Specs that the equation fixes, by the numbers of inputs and outputs.
    input_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    output_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    # Specs of outputs for sums of the compiler of which nothing is known, by numbers.
    likely_specs: Mapping[int, PartitionSpec] = dataclasses.field(default_factory=dict)
    # Outputs that the next turn of a loop takes as inputs, by the number of the output.
    carried: Mapping[int, int] = dataclasses.field(default_factory=dict)
    leaving: Collection[int] = ()  # outputs that may be sums, which are done behind the equation
    totals: Collection[int] = ()  # carried outputs that may be sums, too, if they begin at zero
    # First input of which each turn of a loop takes a part. Outputs that are not carried are those
    # of all turns, then.
    first_of_turn: int | None = None
    shapes: Sequence[tuple[int, ...]] = ()  # of the outputs of the equation, where it is entered

    @property
    def opened(self) -> equations.Program:
        """The program, whose equations may have constants."""
        return equations.opened(self.traced)[0]

    @property
    def constants(self) -> Sequence[Any]:
        """Values of its constants."""
        return equations.opened(self.traced)[1]

    def within(self, outer: "StepProgram", **changes: Any) -> "StepProgram":
        """Return this program as it runs inside of another one, with what is known there."""
        times = None
        if self.times is not None and outer.times is not None:
            times = self.times * outer.times
        return dataclasses.replace(
            self,
            times=times,
            sizes={**outer.sizes, **self.sizes},
            mesh=self.mesh or outer.mesh,
            **changes,
        )

    def automatic(self, workers: WorkerAxis | None = None) -> dict[str, int]:
        """Return the sizes of the axes of several devices that the compiler manages, by name: for a
        sum over manual axes, or for one of `workers`, which the compiler places.
        """
        mesh = self.mesh or jax.sharding.get_abstract_mesh()
        kinds: tuple[Any, ...] = (AxisType.Auto,)
        manual = set(self.sizes)
        if workers is not None:
            mesh, kinds = workers.mesh, (AxisType.Auto, AxisType.Explicit)
            manual.add(workers.axis)
        return {
            name: mesh.shape[name]
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind in kinds and mesh.shape[name] > 1 and name not in manual
        }


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """Equation of a program. Passes add to it, one after the other."""

    equation: Equation
    scopes: str  # names of the scopes around it, its own ones included
    operands: tuple[Origin, ...]  # origins
    results: tuple[Origin, ...]
    programs: tuple[StepProgram, ...]  # inside
    # `chosen` adds these.
    sum: Sum | None = None  # that it is
    why_exact: str | None = None  # the sum stays as it is; None: it is to be compressed
    holds_target: bool = False  # inside of it
    # `flat` adds these.
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Variable, ...] = ()

    @property
    def is_target(self) -> bool:
        """True for sums to compress."""
        return self.sum is not None and self.why_exact is None

    @property
    def may_join(self) -> bool:
        """True for sums that nothing but size or type excludes: large ones take them along."""
        return self.sum is not None and self.why_exact in (SMALL, NOT_FLOATING)

    @property
    def is_zeros(self) -> bool:
        """True for sums of zeros."""
        return self.sum is not None and self.why_exact == ZEROS

    @property
    def variables(self) -> tuple[Value, ...]:
        """Values of the inputs that are variables of its program."""
        pairs = zip(self.equation.invars, self.inputs, strict=True)
        return tuple(value for atom, value in pairs if equations.is_variable(atom))
