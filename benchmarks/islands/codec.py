"""Times of encoding and decoding a message of islands, in nanoseconds a coordinate.

    python -m benchmarks.islands.codec
    python -m benchmarks.islands.codec --size 4194304 --no-save

Times are the shortest ones: other programs of the machine lengthen the others. Beside them: the
largest of each block by `jax.lax.top_k` alone, a copy, the encoders in NumPy and in JAX without the
native codec, and the change with the residual, before it is encoded.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.harness.timing import in_turns
from dynamiq_jax.islands import Sparse, decode, encode, messages
from dynamiq_jax.islands._arithmetic import change_of
from dynamiq_jax.islands._sparse import encoded_in_jax

METHODS: dict[str, Any] = {
    "0.5 bits": Sparse(keep=272),
    "0.25 bits": Sparse(),
    "published, 0.16 bits": Sparse(keep=64, bits=2, gain=1),
    "0.11 bits": Sparse(keep=46),
    "3 bits": "dynamiq:3",
    "4 bits": "dynamiq:4",
    "exact": "exact",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    size: int = 2**24  # coordinates
    repeats: int = 12
    save: bool = True  # write the result to benchmarks/results/islands_codec.json


COLUMNS = (
    Column("message", "message"),
    Column("bits", "bits", "{:.2f}"),
    Column("encode", ("ns", "encode"), "{:.2f} ns"),
    Column("decode", ("ns", "decode"), "{:.2f} ns"),
    Column("decode, NumPy", ("ns", "decode, NumPy"), "{:.2f} ns"),
)


@benchmark("islands_codec")
def main(config: Config) -> Iterator[Report]:
    """Time every kind of message."""
    values = np.random.default_rng(0).standard_normal(config.size, np.float32)
    tree, blocks = {"w": values}, jax.device_put(values.reshape(-1, 4096))
    largest = jax.jit(lambda rows: lax.top_k(abs(rows), Sparse().keep))
    beside = {"copy": values.copy, "top_k": lambda: largest(blocks)}
    form = Sparse().format
    beside["encode, NumPy"] = lambda: form.encode(values)
    in_jax = jax.jit(lambda rows: encoded_in_jax(rows, form, 1.25))
    beside["encode, JAX"] = lambda: in_jax(blocks)
    arrays = [jax.device_put(number * values) for number in range(3)]
    beside["change with residual"] = lambda: change_of(*arrays, 0.95)
    found = {"ns": _times(beside, config), "rows": list[dict[str, Any]]()}
    for name, method in METHODS.items():
        message = encode(tree, method, key=jax.random.key(0))
        calls = {
            "encode": lambda method=method: encode(tree, method, key=jax.random.key(0)),
            "decode": lambda message=message: decode(message, like=tree),
            "decode, NumPy": lambda message=message: messages.decode(message),
        }
        bits = 8 * len(message.body) / config.size
        row = {"message": name, "bits": bits, "ns": _times(calls, config)}
        found["rows"].append(row)
        lines = ", ".join(f"{key} {ns:.2f} ns" for key, ns in found["ns"].items())
        title = f"Time of a coordinate of {config.size:,}, on CPUs"
        yield Report(results=found, shown=[table(title, COLUMNS, found["rows"], lines)])


def _times(calls: dict[str, Callable[[], Any]], config: Config) -> dict[str, float]:
    """Return the shortest time of each call, in nanoseconds a coordinate."""
    seconds = in_turns(calls, config.repeats)
    return {name: 1e9 * min(each) / config.size for name, each in seconds.items()}


if __name__ == "__main__":
    run(main, __doc__)
