"""Costs of an optimized HLO program, with the bodies of loops counted as often as they run.

`cost_analysis` of XLA:TPU counts the body of a loop once.
"""

import collections
import dataclasses
from collections.abc import Iterator

from dynamiq_jax._inspection import hlo
from dynamiq_jax._inspection.hlo import HloComputation, HloInstruction

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "send",  # between slices
)
# Names of arrays that are in memory already.
_NAMES = {
    "after-all",
    "bitcast",
    "constant",
    "get-tuple-element",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_NO_CODE = {"AllocateBuffer", "AssumeGatherIndicesInBound", "ConcatBitcast"}  # custom calls
_MOVES = {"copy", "transpose", "reshape"}  # results hold the values of the operand


@dataclasses.dataclass(frozen=True)
class InstructionCost:
    """An instruction of a program, and what all of its executions cost."""

    instruction: HloInstruction
    times: int  # it runs
    bytes: int  # that one execution reads and writes
    far_bytes: int  # of these, the part outside vector memory
    operand_bytes: int
    moves: bool  # it only changes a layout

    @property
    def total(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.times


class CostProgram(hlo.HloProgram):
    """Optimized HLO program whose instructions have costs."""

    def runs(self) -> list[InstructionCost]:
        """Return all instructions that touch memory; of a conditional, its heaviest branch."""
        return list(self._runs(self.entry, 1))

    def _runs(self, name: str, times: int) -> Iterator[InstructionCost]:
        for instruction in self.computations[name].values():
            if instruction.opcode == "while":
                trips = self.trips(name, instruction)
                if trips is None:
                    raise ValueError(f"The loop {instruction.name} has no constant trip count.")
                yield from self._runs(instruction.called("body"), times * trips)
            elif instruction.opcode == "conditional":
                branches = [list(self._runs(branch, times)) for branch in instruction.callees]
                yield from max(branches, key=lambda runs: sum(run.total for run in runs))
            elif instruction.opcode == "call":
                yield from self._runs(instruction.called("to_apply"), times)
            elif _touches_memory(instruction):
                yield self._run(self.computations[name], instruction, times)

    def _run(
        self, computation: HloComputation, instruction: HloInstruction, times: int
    ) -> InstructionCost:
        traffic = list(self._traffic(computation, instruction))
        return InstructionCost(
            instruction,
            times,
            bytes=sum(size for size, _ in traffic),
            far_bytes=sum(size for size, far in traffic if far),
            operand_bytes=sum(
                computation[name].bytes for name in instruction.operands if name in computation
            ),
            moves=self._moves(instruction),
        )

    def _traffic(
        self, computation: HloComputation, instruction: HloInstruction
    ) -> Iterator[tuple[int, bool]]:
        """Yield the bytes of every read and write, and whether they are outside vector memory."""
        operands = [computation[name] for name in instruction.operands if name in computation]
        if instruction.opcode == "fusion":
            inner = self.computations[instruction.called("calls")]
            results = sizes(instruction.type)
            for written, (_, far) in zip(self._written(inner), results, strict=True):
                yield written, far
            reads = [self._read(inner, number) for number in range(len(operands))]
        elif instruction.opcode.endswith("-start") or instruction.opcode in ("send", "recv"):
            # The type of the result also lists the operand: of a copy last, of others first.
            arrays = sizes(instruction.type)
            if not arrays:  # a barrier
                return
            moved = arrays[0 if instruction.opcode == "copy-start" else -1]
            yield moved
            reads = [min(operand.bytes, moved[0]) for operand in operands]
        else:
            one = {instruction.name: instruction} | computation
            yield _written(instruction, one), _far(instruction)
            reads = [_read_by(instruction, number, one) for number in range(len(operands))]
        for operand, read in zip(operands, reads, strict=True):
            yield read, _far(operand)

    def _written(self, fused: HloComputation) -> list[int]:
        root = next(i for i in fused.values() if i.is_root)
        results = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return [self._written_by(result, fused) for result in results]

    def _written_by(self, result: HloInstruction, fused: HloComputation) -> int:
        while result.opcode in ("bitcast", "copy") and result.operands[0] in fused:
            result = fused[result.operands[0]]
        if result.opcode == "fusion":
            return sum(self._written(self.computations[result.called("calls")]))
        return _written(result, fused)

    def _read(self, fused: HloComputation, number: int) -> int:
        parameter = next(
            i for i in fused.values() if i.opcode == "parameter" and i.text == str(number)
        )
        return min(parameter.bytes, self._read_of(fused, parameter))

    def _read_of(self, fused: HloComputation, value: HloInstruction) -> int:
        total = 0
        for user in fused.values():
            for place, name in enumerate(user.operands):
                if name != value.name:
                    continue
                if user.opcode == "bitcast":
                    total += self._read_of(fused, user)
                elif user.opcode == "fusion":
                    total += self._read(self.computations[user.called("calls")], place)
                else:
                    total += _read_by(user, place, fused)
        return total

    def _moves(self, instruction: HloInstruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode in _MOVES
        opcodes = {i.opcode for i in self.computations[instruction.called("calls")].values()}
        return bool(opcodes & _MOVES) and opcodes <= _MOVES | _NAMES


def collectives(runs: list[InstructionCost]) -> dict[str, dict[str, int]]:
    """Return how often each collective runs, and the bytes of its operands in all executions.

    A send moves bytes between slices; what the host then does with them is not in the program.
    """
    totals: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"times": 0, "bytes": 0})
    for run in runs:
        opcode = run.instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            totals[opcode]["times"] += run.times
            totals[opcode]["bytes"] += run.operand_bytes * run.times
    return dict(totals)


def sizes(types: str) -> list[tuple[int, bool]]:
    """Return the bytes of every array of a type, and whether it lies outside vector memory."""
    return [(array.bytes, "S(1)" not in array.layout) for array in hlo.arrays_of(types)]


def cycles(instruction: HloInstruction) -> int:
    """Return the cycles that the compiler expects; 0 where it gives none."""
    return int(instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


def _touches_memory(instruction: HloInstruction) -> bool:
    """Return whether an instruction reads or writes more than names of arrays."""
    if instruction.opcode == "custom-call":
        return instruction.attribute(r'custom_call_target="([^"]*)"') not in _NO_CODE
    return instruction.opcode not in _NAMES and not instruction.opcode.endswith("-done")


def _far(instruction: HloInstruction) -> bool:
    return any(far for _, far in sizes(instruction.type))


def _written(instruction: HloInstruction, computation: HloComputation) -> int:
    """Return the bytes that an instruction writes: of an update in place, those of the update."""
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(instruction.opcode)
    return instruction.bytes if place is None else computation[instruction.operands[place]].bytes


def _read_by(instruction: HloInstruction, place: int, computation: HloComputation) -> int:
    """Return the bytes of an operand that an instruction reads."""
    if place == 0 and instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return instruction.bytes
    if place == 0 and instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 0
    return computation[instruction.operands[place]].bytes
