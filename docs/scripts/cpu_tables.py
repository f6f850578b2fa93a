"""Table of the page on CPUs: new pages and CPU time of an all-reduce."""

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


ALL = (memory,)
