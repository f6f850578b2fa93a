"""Memory and time of joining a run of islands and of an exchange, in bytes a parameter.

    python -m benchmarks.islands.memory
    python -m benchmarks.islands.memory --sizes 4194304 --no-save

Each row is a process of its own: one island over a folder, with Nesterov momentum, and parameters
in 16 arrays. It begins a run, joins it, and exchanges twice. Peaks are those of the resident memory
of the process over what it had before it made the parameters, which are in them.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from dynamiq_jax.islands import Islands, SharedFolder, Sparse

METHODS: dict[str, Any] = {"0.25 bits": Sparse(), "4 bits": "dynamiq:4"}
LEAVES = 16
ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("0.25 bits", {}),
    ("0.25 bits", {"donate": True}),
    ("0.25 bits", {"donate": True, "state_on": "host"}),
    ("4 bits", {}),
)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    sizes: tuple[int, ...] = (2**24, 2**25, 134_515_008)  # the last one is SmolLM2-135M
    save: bool = True  # write the result to benchmarks/results/islands_memory.json


def measured(size: int, message: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Begin a run, join it, and exchange: peaks in bytes, and seconds."""
    move = jax.jit(lambda tree, step: jax.tree.map(lambda leaf: leaf + step, tree))
    shapes = {str(i): jnp.zeros((size // LEAVES,)) for i in range(LEAVES)}
    with tempfile.TemporaryDirectory() as folder:
        islands = Islands(
            transport=SharedFolder(folder),
            name="a",
            method=METHODS[message],
            feedback=True,
            outer=NESTEROV,
            store_every=10**6,
            **fields,
        )
        before = _resident("VmRSS")
        params = jax.block_until_ready(move(shapes, 0.5))
        del shapes
        found: dict[str, Any] = {"size": size, "message": message, **fields}
        state = None
        for name, call in (
            ("begin", lambda params, _: islands.join(params)),
            ("join", lambda params, _: islands.join(params)),
            ("first exchange", islands.exchange),  # compiles
            ("exchange", islands.exchange),
        ):
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
            start = time.perf_counter()
            state = jax.block_until_ready(call(params, state))
            seconds = time.perf_counter() - start
            found[name] = {"peak": _resident("VmHWM") - before, "seconds": seconds}
            reference = jax.device_put(state.reference, jax.memory.Space.Device)
            params = jax.block_until_ready(move(reference, 1e-3))
            del reference
        arrays = [each for each in jax.live_arrays() if each.sharding.memory_kind == "device"]
        buffers = {each.unsafe_buffer_pointer(): each.nbytes for each in arrays}
        found["on devices"] = sum(buffers.values())  # parameters included
    return found


def _resident(name: str) -> int:
    """Return resident bytes of this process: now (VmRSS), or their peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


COLUMNS = (
    Column("parameters", "size", "{:,}"),
    Column("message", "message"),
    Column("state on", lambda row: row.get("state_on", "device")),
    Column("donated", lambda row: str(row.get("donate", False))),
    Column("on devices, bytes", lambda row: row["on devices"] / row["size"], "{:.1f}"),
    *(
        column
        for name in ("begin", "join", "exchange")
        for column in (
            Column(
                f"{name}, bytes", lambda row, name=name: row[name]["peak"] / row["size"], "{:.1f}"
            ),
            Column(f"{name}, s", (name, "seconds"), "{:.2f}"),
        )
    ),
)


@benchmark("islands_memory")
def main(config: Config) -> Iterator[Report]:
    """Measure every size and message."""
    rows = list[dict[str, Any]]()
    for size in config.sizes:
        for message, fields in ROWS if size == config.sizes[0] else ROWS[:1]:
            asked = json.dumps([size, message, fields])
            command = [sys.executable, "-m", "benchmarks.islands.memory", "--child", asked]
            # Memory that is freed goes back at once, so that what is resident is in use.
            own = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=own)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            title = "Memory of an island, in bytes a parameter, and seconds"
            yield Report(results={"rows": rows}, shown=[table(title, COLUMNS, rows)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measured(*json.loads(sys.argv[2]))))
    else:
        run(main, __doc__)
