"""Tables of the page on CPUs: speed of both codecs, new pages and CPU time of an all-reduce."""

import itertools
from typing import Any

from docs.scripts.result_files import markdown, results_of

_WORKERS = 4
_NAMES = {
    "psum": "`lax.psum`",
    "bf16:ring": "`bf16:ring`",
    "mxfp8:ring": "`mxfp8:ring`, native codec",
    "dynamiq:5:ring:implementation=xla": "`dynamiq:5:ring`, pure-JAX codec",
    "dynamiq:5:ring": "`dynamiq:5:ring`, native codec",
}
_OPERATIONS = {
    "statistics": "norms of the rows",
    "compress": "compress",
    "hop": "decompress, add, compress",
    "decompress_accumulate": "decompress, add",
    "decompress": "decompress",
    "all of a worker": "**all of a worker**",
}


def cpu_worker_ns(*, threads: int, kept: bool) -> float:
    """Return the nanoseconds of the native codec for a coordinate of a worker.

    Args:
      threads: of XLA, and cores.
      kept: whether malloc keeps memory between calls.
    """
    return _times_of_codecs()["all of a worker", threads, kept]["native"]


def native() -> str:
    """Write the time of each operation of the pure-JAX and the native codec."""
    found = _times_of_codecs()
    threads = sorted({number for _, number, _ in found})
    rows = []
    for operation, name in _OPERATIONS.items():
        cells = [name]
        for number, backend in itertools.product(threads, ("xla", "native")):
            new, kept = (found[operation, number, kept][backend] for kept in (False, True))
            cells.append(f"{new:.2f}, {kept:.2f}")
        rows.append(cells)
    header = ["ns a coordinate"] + [
        f"{name}, {number} {'core' if number == 1 else 'cores'}"
        for number, name in itertools.product(threads, ("pure JAX", "native"))
    ]
    return (
        "DynamiQ at 5 bits, for a bucket of 8 Mi float32 coordinates on a ring of 4 workers. In "
        "each cell, the second number is with [memory that is kept](#memory) "
        "(`python -m benchmarks.speed.native`):\n\n" + markdown(header, rows)
    )


def memory() -> str:
    """Write the new pages and the CPU time of a worker, with and without memory that is kept."""
    found: dict[tuple[str, bool, bool], dict[str, Any]] = {
        (row["setting"], row["donated"], row["kept"]): row
        for row in results_of("memory")
        if row["workers"] == _WORKERS
    }
    rows = []
    for setting, name in _NAMES.items():
        plain, donated, kept = (
            found[setting, *case] for case in ((False, False), (True, False), (False, True))
        )
        pages = [f"{row['new_mib']:.0f} MiB" for row in (plain, donated, kept)]
        times = [f"{row['user_ms'] + row['system_ms']:.0f} ms" for row in (plain, kept)]
        rows.append([name, *pages, *times])
    header = ["", "new pages", "donated", "memory kept", "CPU time", "memory kept"]
    return (
        f"New pages and CPU time of a worker, in one all-reduce of 8 Mi float32 coordinates on "
        f"{_WORKERS} virtual devices (`python -m benchmarks.speed.memory`):\n\n"
        + markdown(header, rows)
    )


def _times_of_codecs() -> dict[tuple[str, int, bool], dict[str, Any]]:
    """Return the rows of native.json, by operation, threads and whether memory is kept."""
    return {(row["operation"], row["threads"], row["kept"]): row for row in results_of("native")}


ALL = (native, memory)
