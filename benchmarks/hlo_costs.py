"""Costs of an optimized HLO program, with the bodies of loops counted as often as they run.

`cost_analysis` of XLA:TPU counts the body of a loop once.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "send",  # between slices
)
_BITS = {"pred": 8}  # of types whose name has no number
_ARRAY = re.compile(r"\b([a-z]+)(\d*)(?:e\d\w*)?\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"  (ROOT )?%?([\w.\-]+) = (.*)$")

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
class Instruction:
    """One line of HLO."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # of the operands, between the parentheses
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(size for size, _ in sizes(self.type))

    @property
    def touches_memory(self) -> bool:
        """Whether it reads or writes more than names of arrays."""
        if self.opcode == "custom-call":
            return self.attribute(r'custom_call_target="([^"]*)"') not in _NO_CODE
        return self.opcode not in _NAMES and not self.opcode.endswith("-done")

    @property
    def source(self) -> str:
        """Name that JAX gave the operation."""
        return self.attribute(r'op_name="([^"]*)"')

    @property
    def cycles(self) -> int:
        """Cycles that the compiler expects; 0 where it gives none."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, role: str) -> str:
        """Return the name of the computation with a role: `calls`, `body` or `condition`."""
        return self.attribute(rf"\b{role}=%?([\w.\-]+)")


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Run:
    """An instruction of a program, and what all of its executions cost."""

    instruction: Instruction
    times: int  # it runs
    bytes: int  # that one execution reads and writes
    far_bytes: int  # of these, the part outside vector memory
    operand_bytes: int
    moves: bool  # it only changes a layout

    @property
    def total(self) -> int:
        """Bytes of all executions."""
        return self.bytes * self.times


def sizes(types: str) -> list[tuple[int, bool]]:
    """Return the bytes of every array of a type, and whether it lies outside vector memory.

    Tokens and semaphores are not in the list.
    """
    return [
        (
            math.prod(int(size) for size in shape.split(",") if size)
            * (_BITS[name] if not bits else int(bits))
            // 8,
            "S(1)" not in layout,
        )
        for name, bits, shape, layout in _ARRAY.findall(types)
        if name not in ("token", "opaque") and "S(2)" not in layout
    ]


class Program:
    """Computations of an optimized HLO program."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry
            elif found := _LINE.match(line):
                current[found[2]] = _instruction(found[2], found[3], bool(found[1]))

    def runs(self) -> list[Run]:
        """Return all instructions that touch memory; of a conditional, its heaviest branch."""
        return list(self._runs(self.entry, 1))

    def trips(self, computation: str, loop: Instruction) -> int | None:
        """Return how often the body of a loop runs; None where that is not a constant."""
        condition = self.computations[loop.called("condition")]
        comparisons = [i for i in condition.values() if i.opcode == "compare"]
        if len(comparisons) != 1 or "direction=LT" not in comparisons[0].attributes:
            return None
        first, limit = (
            self._constant(computation, loop, condition, name) for name in comparisons[0].operands
        )
        return None if first is None or limit is None else limit - first

    def _runs(self, name: str, times: int) -> Iterator[Run]:
        for instruction in self.computations[name].values():
            if instruction.opcode == "while":
                trips = self.trips(name, instruction)
                if trips is None:
                    raise ValueError(f"The loop {instruction.name} has no constant trip count.")
                yield from self._runs(instruction.called("body"), times * trips)
            elif instruction.opcode == "conditional":
                names = instruction.attribute(r"branch_computations=\{([^}]*)\}")
                branches = [
                    list(self._runs(branch, times)) for branch in re.findall(r"[\w.\-]+", names)
                ]
                yield from max(branches, key=lambda runs: sum(run.total for run in runs))
            elif instruction.opcode == "call":
                yield from self._runs(instruction.called("to_apply"), times)
            elif instruction.touches_memory:
                yield self._run(self.computations[name], instruction, times)

    def _run(self, computation: Computation, instruction: Instruction, times: int) -> Run:
        traffic = list(self._traffic(computation, instruction))
        return Run(
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
        self, computation: Computation, instruction: Instruction
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
            moved = sizes(instruction.type)[0 if instruction.opcode == "copy-start" else -1]
            yield moved
            reads = [min(operand.bytes, moved[0]) for operand in operands]
        else:
            one = {instruction.name: instruction} | computation
            yield _written(instruction, one), _far(instruction)
            reads = [_read_by(instruction, number, one) for number in range(len(operands))]
        for operand, read in zip(operands, reads, strict=True):
            yield read, _far(operand)

    def _written(self, fused: Computation) -> list[int]:
        root = next(i for i in fused.values() if i.is_root)
        results = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return [self._written_by(result, fused) for result in results]

    def _written_by(self, result: Instruction, fused: Computation) -> int:
        while result.opcode in ("bitcast", "copy") and result.operands[0] in fused:
            result = fused[result.operands[0]]
        if result.opcode == "fusion":
            return sum(self._written(self.computations[result.called("calls")]))
        return _written(result, fused)

    def _read(self, fused: Computation, number: int) -> int:
        parameter = next(
            i for i in fused.values() if i.opcode == "parameter" and i.text == str(number)
        )
        return min(parameter.bytes, self._read_of(fused, parameter))

    def _read_of(self, fused: Computation, value: Instruction) -> int:
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

    def _moves(self, instruction: Instruction) -> bool:
        if instruction.opcode != "fusion":
            return instruction.opcode in _MOVES
        opcodes = {i.opcode for i in self.computations[instruction.called("calls")].values()}
        return bool(opcodes & _MOVES) and opcodes <= _MOVES | _NAMES

    def _constant(
        self, outer: str, loop: Instruction, condition: Computation, name: str
    ) -> int | None:
        """Return the value that an operand of a loop's condition has at the start of the loop."""
        value = _origin(condition, name)
        if value.opcode == "get-tuple-element":
            start = self.computations[outer][loop.operands[0]]
            if start.opcode != "tuple":
                return None
            index = int(value.attribute(r"index=(\d+)"))
            value = _origin(self.computations[outer], start.operands[index])
        return int(value.text) if value.opcode == "constant" else None


def collectives(runs: list[Run]) -> dict[str, dict[str, int]]:
    """Return how often each collective runs, and the bytes of its operands in all executions.

    A send moves bytes between slices; what the host then does with them is not in the program.
    """
    found: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"times": 0, "bytes": 0})
    for run in runs:
        opcode = run.instruction.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            found[opcode]["times"] += run.times
            found[opcode]["bytes"] += run.operand_bytes * run.times
    return dict(found)


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, operands_start = rest[type_end:].split("(", 1)[0].strip(), rest.index("(", type_end)
    end = _closing(rest, operands_start)
    text = rest[operands_start + 1 : end]
    names = tuple(re.findall(r"%([\w.\-]+)", text))
    return Instruction(name, rest[:type_end], opcode, names, text.strip(), rest[end + 1 :], is_root)


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"No parenthesis closes {text[start : start + 80]!r}.")


def _origin(computation: Computation, name: str) -> Instruction:
    value = computation[name]
    while value.opcode in ("bitcast", "convert", "copy"):
        value = computation[value.operands[0]]
    return value


def _far(instruction: Instruction) -> bool:
    return any(far for _, far in sizes(instruction.type))


def _written(instruction: Instruction, computation: Computation) -> int:
    """Return the bytes that an instruction writes: of an update in place, those of the update."""
    place = {"dynamic-update-slice": 1, "scatter": 2}.get(instruction.opcode)
    return instruction.bytes if place is None else computation[instruction.operands[place]].bytes


def _read_by(instruction: Instruction, place: int, computation: Computation) -> int:
    """Return the bytes of an operand that an instruction reads."""
    if place == 0 and instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return instruction.bytes
    if place == 0 and instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 0
    return computation[instruction.operands[place]].bytes
