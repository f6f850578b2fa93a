"""Evaluation of a scheduled program, while JAX traces it anew."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array, lax

from dynamiq_jax._buckets import order
from dynamiq_jax._buckets.axes import find_axes
from dynamiq_jax._inputs.options import Compression
from dynamiq_jax._rewriting import inner
from dynamiq_jax._rewriting.nodes import Constant, Key
from dynamiq_jax._rewriting.schedule import Enter, Evaluate, EvaluationSchedule, Reduce
from dynamiq_jax._rewriting.sums import Selection, is_refused
from dynamiq_jax._run.driver import run
from dynamiq_jax._worker_loss.fingerprint import joint_word_of
from dynamiq_jax._worker_loss.unreduced import is_unreduced, reduce_unreduced


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Rules for the compressed sums of a program."""

    selection: Selection
    compression: Compression
    specs: Any = None  # one for all sums, or a function of a `Sum`

    def run(self, schedule: EvaluationSchedule, key: Array | None, *values: Any) -> list[Any]:
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
                    results = self._evaluate(step, list(map(read, step.inputs)))
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

    def _body(self, schedule: EvaluationSchedule) -> inner.Body:
        return lambda key, *values: self.run(schedule, key, *values)

    def _evaluate(self, step: Evaluate, values: list[Any]) -> Sequence[Any]:
        if self.selection.axes[0] not in step.axes:
            return step.function(*values)
        return _in_order(step.function, values)

    def _reduce(self, group: Reduce, operands: Sequence[Any], key: Array | None) -> list[Any]:
        """Reduce the operands of a group in one compressed collective, and refused ones exactly."""
        names = group.members[0].description.axes
        # Only a psum has several operands, of which some can be refused.
        refused = [i for i, member in enumerate(group.members) if is_refused(member.why_exact)]
        joint = [i for i in range(len(operands)) if i not in refused]
        results: dict[int, Any] = {}
        if refused:
            terms = [operands[i] for i in refused]
            exactly = _in_order(lambda *terms: lax.psum(terms, names), terms)
            results |= zip(refused, exactly, strict=True)
        over = tuple(name for name in self.selection.axes if name in names)
        tree = {f"sum_{i}": operands[i] for i in joint}
        if further := tuple(name for name in names if name not in over):
            tree = lax.psum(tree, further)

        def compressed(tree: dict[str, Any]) -> dict[str, Any]:
            collective = group.collective(find_axes(over))
            of_group = self._key(group, tree, over, key)
            outcome = run(collective, tree, of_group, self.compression, specs=self._specs(group))
            total: dict[str, Any] = outcome.tree
            return total

        if is_unreduced(tree):  # outside of a map, on explicit axes
            totals = reduce_unreduced(compressed, tree, over)
            totals = {
                f"sum_{i}": jax.sharding.reshard(
                    totals[f"sum_{i}"], group.members[i].params["dst_sharding"]
                )
                for i in joint
            }
        else:
            totals = compressed(tree)
        results |= {i: totals[f"sum_{i}"] for i in joint}
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
        token = order.last_token()
        leaves = [order.after(token, leaf) for leaf in tree.values()]
        return jax.random.fold_in(base, joint_word_of(leaves, over))

    def _specs(self, group: Reduce) -> Any:
        if not callable(self.specs):
            return self.specs
        return {
            f"sum_{i}": self.specs(member.description)
            for i, member in enumerate(group.members)
            if not is_refused(member.why_exact)
        }


def _in_order(collective: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Sequence[Any]:
    """Run a collective behind the last one of the trace, and before the next."""
    token = order.last_token()
    results = collective(*(order.after(token, value) for value in values))
    order.remember(order.token_of(results))
    return results
