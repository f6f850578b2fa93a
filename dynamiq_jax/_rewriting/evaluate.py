"""Evaluation of a scheduled program, while JAX traces it anew."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax

from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.nodes import Constant, Key
from dynamiq_jax._rewriting.schedule import Enter, Evaluate, Reduce, Schedule
from dynamiq_jax._rewriting.sums import Selection, is_refused
from dynamiq_jax._run.driver import run
from dynamiq_jax._worker_loss.fingerprint import word_of


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Rules for the compressed sums of a program."""

    selection: Selection
    compression: Compression
    specs: Any = None  # one for all sums, or a function of a `Sum`

    def run(self, schedule: Schedule, key: Array | None, *values: Any) -> list[Any]:
        """Evaluate a program.

        Args:
          schedule: schedule of the program.
          key: PRNG key for all sums, the same on all workers; None: from the bits of each group.
          values: inputs of the program.
        """
        known: dict[Key, Any] = dict(schedule.constants)
        known.update(zip(schedule.inputs, values, strict=True))

        def read(each: Key) -> Any:
            return each.value if isinstance(each, Constant) else known[each]

        for step in schedule.steps:
            match step:
                case Evaluate():
                    results = step.function(*map(read, step.inputs))
                    known.update(zip(step.outputs, results, strict=True))
                case Enter():
                    bodies = [self._body(program) for program in step.programs]
                    inputs = [read(each) for each in step.inputs]
                    results = inner.make_anew(step.equation, step.scopes, bodies, key, inputs)
                    known.update(zip(step.outputs, results, strict=True))
                case Reduce():
                    operands = [read(member.operand) for member in step.members]
                    results = self._reduce(step, operands, key)
                    known.update(
                        (member.result, result)
                        for member, result in zip(step.members, results, strict=True)
                    )
        return [read(each) for each in schedule.outputs]

    def _body(self, schedule: Schedule) -> inner.Body:
        return lambda key, *values: self.run(schedule, key, *values)

    def _reduce(self, group: Reduce, operands: Sequence[Any], key: Array | None) -> list[Any]:
        """Reduce the operands of a group in one compressed collective, and refused ones exactly."""
        names = group.members[0].description.axes
        # Only a psum has several operands, of which some can be refused.
        refused = [i for i, member in enumerate(group.members) if is_refused(member.why_exact)]
        results: dict[int, Any] = {i: lax.psum(operands[i], names) for i in refused}
        tree = {f"sum_{i}": each for i, each in enumerate(operands) if i not in refused}
        over = tuple(name for name in self.selection.axes if name in names)
        if further := tuple(name for name in names if name not in over):
            tree = lax.psum(tree, further)
        key = self._key(group, tree, over, key)
        collective = group.collective(find_axes(over))
        specs = self._specs(group, tree)
        total = run(collective, tree, key, self.compression, specs=specs).tree
        results |= {int(name.removeprefix("sum_")): each for name, each in total.items()}
        return [results[i] for i in range(len(operands))]

    @staticmethod
    def _key(
        group: Reduce, tree: Mapping[str, Any], over: tuple[str, ...], key: Array | None
    ) -> Array:
        """Return the key of a group.

        Bits of the operands of all workers change from step to step, and from turn to turn of a
        loop, in which a given key is the same.
        """
        base = jax.random.key(0) if key is None else key
        base = jax.random.fold_in(base, group.number)
        if key is not None and group.times == 1:
            return base
        return jax.random.fold_in(base, word_of(list(tree.values()), over))

    def _specs(self, group: Reduce, tree: Mapping[str, Any]) -> Any:
        if not callable(self.specs):
            return self.specs
        return {
            name: self.specs(group.members[int(name.removeprefix("sum_"))].description)
            for name in tree
        }
