"""Compile the native codec with one deliberate fault after the other, and report who notices it.

    python -m tests.native_faults            all faults: about 10 minutes of a core
    python -m tests.native_faults --only 7   the one of this number

Each fault is made in a copy of the project. The check at the first use is tried first, and the
tests of the native codec where the check notices nothing. The exit status is 1 if nobody notices
more than one fault.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.native_faults.faults import FAULTS, Fault
from tests.support.faults import copy_project, errors, faulty

MOST_UNNOTICED = 1
# Less optimized than the library of users, which takes its compiler several times as long.
COMPILE = """
from pathlib import Path
from pallas_kernels._native import build
build._FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build._FLAGS)
build.compile_library(Path(build.__file__).with_name(build.LIBRARY), build.include_directory())
"""
CHECK = """
import sys
from pallas_kernels import first_use
from pallas_kernels.registry import BACKENDS, BASE
native = BACKENDS["native"]
sys.exit(native.why_not_here() or first_use.difference(native, BASE))
"""
TESTS = [
    *(f"tests/kernels/test_native{name}.py" for name in ("", "_programs", "_default", "_blocks")),
    *("tests/kernels/test_native_copies.py", "tests/kernels/test_copies.py"),
    "tests/islands/test_sparse_codecs.py",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, help="number of the fault, from 0")
    only = parser.parse_args().only
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_project(root)
        for number, fault in enumerate(FAULTS):
            if only in (None, number):
                said = noticed(root, fault)
                unnoticed += said is None
                print(
                    f"{number:2} {fault.file}: {fault.old}\n   {said or 'NOT NOTICED'}", flush=True
                )
    print(f"{unnoticed} not noticed")
    return int(unnoticed > MOST_UNNOTICED)


def noticed(root: Path, fault: Fault) -> str | None:
    """Return who notices a fault, and the first words; None if nobody does."""
    path = root / "pallas_kernels" / "_native" / "src" / fault.file
    with faulty(path, fault.old, fault.new):
        if error := errors(root, "-c", COMPILE):
            raise RuntimeError(f"{fault} does not compile: {error}")
        if error := errors(root, "-c", CHECK):
            return f"the check: {error.splitlines()[-1]:.150}"
        if error := errors(root, "-m", "pytest", "-x", "-q", "-m", "not slow", *TESTS):
            return f"tests: {error.splitlines()[-1]:.150}"
        return None


if __name__ == "__main__":
    sys.exit(main())
