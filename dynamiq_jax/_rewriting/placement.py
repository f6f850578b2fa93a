"""Specs of sums over axes that the compiler manages, from the values that they are combined with.

A gradient lies as its parameter does, and the two are combined element by element where the
parameter is updated. So the spec of one is that of the other, if it can be seen: as the sharding of
an argument, of a function that is jitted, or of `with_sharding_constraint`.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from dynamiq_jax._inputs.shards import names_of, over
from dynamiq_jax._rewriting.inner import specs_of_shardings
from dynamiq_jax._rewriting.nodes import Constant, Node, Value
from dynamiq_jax._rewriting.rows import rows_of_spec
from pallas_kernels._jax import equations

# Equations whose result lies as their inputs of the same shape do.
_ELEMENTWISE = {
    *("abs", "add", "add_any", "clamp", "convert_element_type", "copy", "div", "erf", "exp"),
    *("integer_pow", "is_finite", "log", "logistic", "max", "min", "mul", "neg", "pcast", "pow"),
    *("pvary", "rsqrt", "select_n", "sharding_constraint", "sign", "sqrt", "square", "sub", "tanh"),
    *("psum", "psum_invariant"),
}
# Equations whose result lies as their first input does, where they cut no dimension that is split.
_SLICES = {"dynamic_slice", "slice"}


class Placement:
    """Specs of the values of a program."""

    def __init__(self, nodes: Iterable[Node]):
        self._parents: dict[Value, Value] = {}
        self._specs: list[tuple[Value, PartitionSpec]] = []  # that are known
        self._cuts: list[tuple[Value, tuple[Value, Sequence[int]]]] = []  # wholes, dimensions cut
        for node in nodes:
            self._read(node)

    def learn(self, values: Sequence[Value], specs: Mapping[int, PartitionSpec]) -> None:
        """Add specs of values that are known, by their numbers, in front of all questions."""
        self._specs += [(values[number], spec) for number, spec in specs.items()]

    def spec(self, value: Value, axes: Iterable[str]) -> PartitionSpec | None:
        """Return the only spec of a value over some axes that is known; None if there is none."""
        kept = set(axes)
        if (typed := _spec_of_type(value)) is not None:
            return equations.trimmed(over(typed, kept))
        found = self._known(value, kept) or {
            spec
            for whole, cut in self._cuts_alike.get(self._root(value), ())
            for spec in self._known(whole, kept)
            if all(each is None or dim not in cut for dim, each in enumerate(spec))
        }
        return found.pop() if len(found) == 1 else None

    def scattered(self, value: Value, axis: str) -> int | None:
        """Return the dimension of a value that an axis alone splits; None if there is none.

        One that splits it is enough, such as of the state of an optimizer whose parameters are
        whole: what such a value is combined with is made in parts.
        """
        specs = {self.spec(value, [axis]), *self._known(value, [axis])} - {None}
        dims = {dim for spec in specs for dim in rows_of_spec(spec, axis)}
        return dims.pop() if len(dims) == 1 else None

    def specs(self, values: Sequence[Value]) -> dict[int, PartitionSpec]:
        """Return the specs of values over all axes, by their numbers, of those that are known."""
        axes = {axis for _, spec in self._specs for part in spec for axis in names_of(part)}
        found = ((i, self.spec(value, axes)) for i, value in enumerate(values))
        return {i: spec for i, spec in found if spec is not None}

    def _read(self, node: Node) -> None:
        if node.equation.primitive.name in _SLICES:
            before, after = map(
                equations.shape_of, (node.equation.invars[0], node.equation.outvars[0])
            )
            cut = [dim for dim, size in enumerate(after) if size != before[dim]]
            self._cuts.append((node.outputs[0], (node.inputs[0], cut)))
        if node.equation.primitive.name not in _ELEMENTWISE:
            return
        (variable,), (output,) = node.equation.outvars, node.outputs
        for atom, value in zip(node.equation.invars, node.inputs, strict=True):
            is_alike = equations.shape_of(atom) == equations.shape_of(variable)
            if is_alike and not isinstance(value, Constant):
                self._parents[self._root(value)] = self._root(output)
        sharding = node.equation.params.get("sharding")
        if node.equation.primitive.name == "sharding_constraint" and sharding is not None:
            self.learn([output], specs_of_shardings([sharding]))

    def _known(self, value: Value, axes: Collection[str]) -> set[PartitionSpec]:
        """Return the specs that are known of a value, or of others that lie as it does."""
        found = self._specs_alike.get(self._root(value), ())
        return {equations.trimmed(over(spec, axes)) for spec in found}

    @functools.cached_property
    def _specs_alike(self) -> Mapping[Value, list[PartitionSpec]]:
        return self._by_root(self._specs)

    @functools.cached_property
    def _cuts_alike(self) -> Mapping[Value, list[tuple[Value, Sequence[int]]]]:
        return self._by_root(self._cuts)

    def _by_root(self, known: Iterable[tuple[Value, Any]]) -> Mapping[Value, list[Any]]:
        """Group what is known of values by the root of those that lie as they do."""
        found: dict[Value, list[Any]] = {}
        for value, each in known:
            found.setdefault(self._root(value), []).append(each)
        return found

    def _root(self, value: Value) -> Value:
        while (parent := self._parents.get(value, value)) != value:
            self._parents[value] = self._parents.get(parent, parent)  # halves the way next time
            value = parent
        return value


def _spec_of_type(value: Value) -> PartitionSpec | None:
    """Return the spec in the type of a value; None on axes that the compiler manages."""
    if isinstance(value, Constant):
        return None
    sharding = getattr(value.var.aval, "sharding", None)
    is_explicit = sharding is not None and sharding.mesh.explicit_axes
    return equations.typed_spec(value.var) if is_explicit else None
