"""Make one deliberate fault after the other in `dq.compress`, and report who notices it.

    python -m tests.rewriting_faults            all faults: about 20 minutes of a core
    python -m tests.rewriting_faults --only 7   the one of this number

Each fault is made in a copy of the project. The tests of `tests/compress` that it is likely to fail
are tried first, and all of them where these notice nothing. The exit status is 1 if nobody notices
more than two faults.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.rewriting_faults.faults import FAULTS, Fault
from tests.support.faults import copy_project, errors, faulty

MOST_UNNOTICED = 2
PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the faults, from 0")
    parser.add_argument("--likely", action="store_true", help="only try the likely tests")
    options = parser.parse_args()
    numbers = options.only or range(len(FAULTS))
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy_project(root)
        for number in numbers:
            fault = FAULTS[number]
            said = noticed(root, fault, only_likely=options.likely)
            unnoticed += said is None
            print(f"{number:2} {fault.file}: {fault.what}\n   {said or 'NOT NOTICED'}", flush=True)
    print(f"{len(numbers) - unnoticed} of {len(numbers)} noticed")
    return int(unnoticed > MOST_UNNOTICED)


def noticed(root: Path, fault: Fault, *, only_likely: bool = False) -> str | None:
    """Return the first test that fails with a fault; None if none does."""
    with faulty(root / fault.file, fault.old, fault.new):
        for tests in ([f"tests/compress/{fault.test}", *fault.options], ["tests/compress"]):
            if error := errors(root, *PYTEST, *tests):
                failed = [
                    line for line in error.splitlines() if line.startswith(("FAILED", "ERROR"))
                ]
                return (failed or error.splitlines())[-1][:150]
            if only_likely:
                return None
    return None


if __name__ == "__main__":
    sys.exit(main())
