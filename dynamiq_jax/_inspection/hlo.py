"""Text of a compiled program (HLO): computations of instructions, and their source lines."""

import dataclasses
import math
import pathlib
import re
from typing import NamedTuple

import pallas_kernels
from dynamiq_jax._core.text import short_name

_ARRAY = re.compile(r"\b([a-z]+)(\d*)(e\d\w*)?\[([\d,]*)\](\{[^}]*\})?")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_LINE = re.compile(r"  (ROOT )?%?([\w.\-]+) = (.*)$")
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.\-]+)"
    r"|\b(?:branch|called)_computations=\{([^}]*)\}"
)
# The caller of a collective is of interest, not the lines of this library.
_OURS = (str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(pallas_kernels.__file__).parent))


class ArrayType(NamedTuple):
    """Type of one array of a result."""

    dtype: str  # as HLO spells it, such as "f32"
    shape: tuple[int, ...]
    layout: str  # with its braces; empty where it is the default

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 if self.dtype == "pred" else int(re.findall(r"\d+", self.dtype)[0])

    @property
    def bytes(self) -> int:
        """Bytes of the array, without padding."""
        return self.size * self.bits // 8


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One line of HLO."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str  # of the operands, between the parentheses
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> list[ArrayType]:
        """Types of the arrays of the result, without tokens and semaphores."""
        return arrays_of(self.type)

    @property
    def bytes(self) -> int:
        """Bytes of the result, without padding."""
        return sum(array.bytes for array in self.arrays)

    @property
    def source(self) -> str:
        """Name that JAX gave the operation."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"')

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the attributes, or an empty string."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

    def called(self, role: str) -> str:
        """Return the name of the computation with a role: `calls`, `body` or `condition`."""
        return self.attribute(rf"\b{role}=%?([\w.\-]+)")

    @property
    def callees(self) -> list[str]:
        """Names of all computations that it calls, whatever their roles."""
        calls = _CALLS.findall(_TEXT.sub("", self.attributes))
        return [name for pair in calls for name in re.findall(r"[\w.\-]+", ",".join(pair))]


HloComputation = dict[str, HloInstruction]


class HloProgram:
    """Computations of a program."""

    def __init__(self, text: str):
        self.computations: dict[str, HloComputation] = {}
        self.entry = ""
        current: HloComputation = {}
        for line in text.splitlines():
            if match := _LINE.match(line):
                current[match[2]] = _instruction(match[2], match[3], bool(match[1]))
            elif head := _HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else self.entry

    def trips(self, computation: str, loop: HloInstruction) -> int | None:
        """Return how often the body of a loop runs; None where that is not a constant."""
        if known := loop.attribute(r'known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        # XLA for TPUs does not write it.
        condition = self.computations[loop.called("condition")]
        comparisons = [i for i in condition.values() if i.opcode == "compare"]
        if len(comparisons) != 1 or "direction=LT" not in comparisons[0].attributes:
            return None
        first, limit = (
            self._constant(computation, loop, condition, name) for name in comparisons[0].operands
        )
        return None if first is None or limit is None else max(0, limit - first)

    def _constant(
        self, outer: str, loop: HloInstruction, condition: HloComputation, name: str
    ) -> int | None:
        """Return the value that an operand of a loop's condition has at the start of the loop."""
        value = _origin(condition, name)
        if value.opcode == "get-tuple-element":
            start = self.computations[outer][loop.operands[0]]
            if start.opcode != "tuple":
                return None
            index = int(value.attribute(r"index=(\d+)"))
            value = _origin(self.computations[outer], start.operands[index])
        is_whole = value.opcode == "constant" and re.fullmatch(r"-?\d+", value.text)
        return int(value.text) if is_whole else None


def arrays_of(types: str) -> list[ArrayType]:
    """Return the types of all arrays in the text of a type."""
    return [
        ArrayType(
            f"{name}{bits}{rest}", tuple(int(size) for size in shape.split(",") if size), layout
        )
        for name, bits, rest, shape, layout in _ARRAY.findall(types)
        if name not in ("token", "opaque") and "S(2)" not in layout
    ]


def parts_of(type: str) -> list[str]:
    """Split the text of a tuple type into its parts; any other type is one part."""
    if not type.startswith("("):
        return [type]
    parts, depth = [""], 0
    for letter in type[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _instruction(name: str, rest: str, is_root: bool) -> HloInstruction:
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, operands_start = rest[type_end:].split("(", 1)[0].strip(), rest.index("(", type_end)
    end = _closing(rest, operands_start)
    text = rest[operands_start + 1 : end]
    names = tuple(re.findall(r"%([\w.\-]+)", text))
    return HloInstruction(
        name, rest[:type_end], opcode, names, text.strip(), rest[end + 1 :], is_root
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"No parenthesis closes {text[start : start + 80]!r}.")


def _origin(computation: HloComputation, name: str) -> HloInstruction:
    value = computation[name]
    while value.opcode in ("bitcast", "convert", "copy"):
        value = computation[value.operands[0]]
    return value


def is_whole(text: str) -> bool:
    """Return whether the text of a program is complete: a part would lack collectives."""
    return bool(re.search(r"^ENTRY ", text, re.M)) and text.rstrip().rpartition("\n")[2] == "}"


class SourcePlaces:
    """Table of source lines at the beginning of the text of a program."""

    def __init__(self, text: str):
        files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
        lines = {
            number: (files[file], line)
            for number, file, line in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", _section(text, "FileLocations"), re.M
            )
        }
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}",
            _section(text, "StackFrames"),
            re.M,
        )
        self._frames = {
            int(number): (*lines[location], int(parent or 0)) for number, location, parent in frames
        }
        # Some versions of XLA number parents from 1, and the first frame has none.
        self._shift = 1 if self._frames.get(1, ("", "", 0))[2] == 1 else 0

    def of(self, instruction: HloInstruction) -> str:
        """Return the line outside of this library that an instruction comes from, as "train.py:7".

        It is empty if not known.
        """
        frame = int(instruction.attribute(r"stack_frame_id=(\d+)") or 0)
        while frame in self._frames:
            file, line, parent = self._frames[frame]
            if not file.startswith(_OURS):
                return f"{short_name(file)}:{line}"
            frame = parent - self._shift if parent - self._shift < frame else 0
        match = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.attributes)
        return f"{short_name(match[1])}:{match[2]}" if match else ""


def _section(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return match[1] if match else ""
