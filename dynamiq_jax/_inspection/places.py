"""Lines of source code that instructions of a program come from."""

import pathlib
import re
from typing import NamedTuple

import pallas_kernels
from dynamiq_jax._core.text import short_name
from pallas_kernels._jax.compat import override

# The caller of a collective is of interest, not the lines of this library.
_OURS = (str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(pallas_kernels.__file__).parent))


class Place(NamedTuple):
    """Line of a file."""

    file: str
    line: int
    column: int

    @property
    def key(self) -> str:
        """Full path, line and column."""
        return f"{self.file}:{self.line}:{self.column}"

    @override
    def __str__(self) -> str:
        return f"{short_name(self.file)}:{self.line}"


class SourcePlaces:
    """Table of the source lines of a program, which its text opens with."""

    def __init__(self, text: str):
        files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
        lines = {
            number: Place(files[file], int(line), int(column))
            for number, file, line, column in re.findall(
                r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+) .*?column=(\d+)",
                _section(text, "FileLocations"),
                re.M,
            )
        }
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}",
            _section(text, "StackFrames"),
            re.M,
        )
        self._frames = {
            int(number): (lines[location], int(parent or 0)) for number, location, parent in frames
        }
        # Some versions of XLA number parents from 1, and the first frame has none.
        self._shift = 1 if self._frames.get(1, (None, 0))[1] == 1 else 0

    def of(self, attributes: str) -> Place | None:
        """Return the line outside of this library that an instruction comes from, if known."""
        match = re.search(r"stack_frame_id=(\d+)", attributes)
        frame = int(match[1]) if match else 0
        while frame in self._frames:
            place, parent = self._frames[frame]
            if not place.file.startswith(_OURS):
                return place
            frame = parent - self._shift if parent - self._shift < frame else 0
        if line := re.search(r'source_file="([^"]*)" source_line=(\d+)', attributes):
            return Place(line[1], int(line[2]), 0)
        return None


def _section(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return match[1] if match else ""
