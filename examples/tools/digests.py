"""Digests that tell what a run depends on from something else."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

AT_ENDS = 2**20  # bytes: to read all of a large model would take minutes


def of_arrays(arrays: Iterable[NDArray]) -> str:
    """Return the digest of the values of arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def of_files(files: Iterable[Path]) -> str:
    """Return the digest of the names, the sizes and both ends of files."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(AT_ENDS))
            file.seek(max(size - AT_ENDS, file.tell()))
            digest.update(file.read())
    return digest.hexdigest()
