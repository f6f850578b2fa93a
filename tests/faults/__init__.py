"""Deliberate faults, each of which the tests have to notice.

    python -m tests.faults                  apply all of them, one by one, and print a table
    python -m tests.faults --only sharded   those whose name or file contains a word
    python -m tests.faults --jobs 2         apply so many at a time
    python -m tests.faults --json FILE      also write the table to a file

A fault is a small change of one file that makes the program wrong. It is applied to a copy of the
checkout, where the tests that are about it run (without those marked slow). The run fails if one
passes unnoticed, or if its text is no longer in the file. It takes half an hour on two cores,
so it is not part of the tests.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Fault:
    """A change of one file, and the tests that have to fail with it."""

    name: str  # the wrong behavior, in a few words
    file: str
    old: str  # text that is in the file once
    new: str
    tests: tuple[str, ...]  # files, or single tests, as pytest takes them
    equivalent: str = ""  # why no test can notice it, if none can
