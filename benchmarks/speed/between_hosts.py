"""Count the bytes between hosts of several devices, beside those that `dq.inspect` shows.

    python -m benchmarks.speed.between_hosts
    python -m benchmarks.speed.between_hosts --hosts 3 --devices 2 --no-save

Hosts are emulated (Linux, root, iproute2). Their interfaces also count headers, and confirmations
of what arrives: a twentieth of large messages.
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.emulation.host import Host, serve
from benchmarks.emulation.hosts import joined_hosts
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from pallas_kernels._jax.compat import override

MODULE = "benchmarks.speed.between_hosts"
AXES = ("hosts", "local")
EXACT = {
    "ppermute": lambda x: lax.ppermute(x, AXES, _next()),
    "all_gather": lambda x: lax.all_gather(x[: x.size // _count()], AXES, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, AXES, 0, 0, tiled=True),
    "psum": lambda x: lax.psum(x, AXES),
    "psum_scatter": lambda x: jnp.tile(lax.psum_scatter(x, AXES, tiled=True), _count()),
}
TOPOLOGIES = ("ring", "butterfly", "all_to_all")
SUMS = tuple(f"{axes}, {name}" for axes in ("one axis", "two axes") for name in TOPOLOGIES)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    hosts: int = 2
    devices: int = 8  # of each host
    size: int = 3 * 2**19  # coordinates of each device
    repeats: int = 4
    save: bool = True  # write the result to benchmarks/results/between_hosts.json


@benchmark("between_hosts")
def main(options: Config) -> Report:
    """Run each sum on emulated hosts, and read the counters of their interfaces."""
    count = options.hosts * options.devices
    are_powers = all(number & (number - 1) == 0 for number in (options.hosts, count))
    names = [name for name in (*EXACT, *SUMS) if are_powers or "butterfly" not in name]
    given = {"devices": options.devices, "size": options.size - options.size % count}
    rows = []
    with joined_hosts(options.hosts, MODULE, given, timeout=120) as hosts:
        for name in names:
            shown = hosts.ask({"do": "compile", "name": name}, name)[0]["shown"]
            before = hosts.network.bytes_sent()
            hosts.ask({"do": "run", "repeats": options.repeats}, name)
            after = hosts.network.bytes_sent()
            counted = max(np.subtract(after, before)) / options.repeats
            rows.append({"name": name, "shown": shown, "counted": counted})
    columns = (
        Column("sum", "name"),
        Column("inspect", lambda row: row["shown"] / 1e6, "{:.2f} MB"),
        Column("interface", lambda row: row["counted"] / 1e6, "{:.2f} MB"),
        Column("ratio", lambda row: row["counted"] / row["shown"], "{:.2f}"),
    )
    title = f"Bytes of a host, of {options.hosts} with {options.devices} devices each"
    return Report(results=rows, shown=[table(title, columns, rows)])


class HostOfDevices(Host):
    """Host with several devices, which run one sum after the other."""

    @override
    def join(self) -> dict[str, Any]:
        """Join the other hosts, and draw a vector for each device."""
        answer = super().join()
        shape = (self.num_hosts, self.config["devices"])
        self._mesh = Mesh(np.array(jax.devices()).reshape(shape), AXES)
        size = self.config["size"]

        def drawn(index: Any) -> np.ndarray:
            return np.random.default_rng(index[0].start).normal(size=size).astype(np.float32)

        where = NamedSharding(self._mesh, P(AXES))
        total = jax.device_count() * size
        self._values = jax.make_array_from_callback((total,), where, drawn)
        return answer

    def compile(self, name: str) -> dict[str, Any]:
        """Compile a sum, run it once, and return the bytes that an inspection shows."""
        local = EXACT.get(name) or functools.partial(_compressed, name)
        specs = {"in_specs": P(AXES), "out_specs": P(AXES), "check_vma": False}
        mapped = jax.shard_map(local, mesh=self._mesh, **specs)
        if name.startswith("one axis"):
            flat = Mesh(self._mesh.devices.reshape(-1), ("all",))
            specs = {"in_specs": P("all"), "out_specs": P("all"), "check_vma": False}
            mapped = jax.shard_map(local, mesh=flat, **specs)
        self._function = jax.jit(mapped)
        self._function(self._values).block_until_ready()
        return {"shown": dq.inspect(self._function, self._values).bytes_of_host}

    def run(self, repeats: int) -> dict[str, Any]:
        """Run the sum that was compiled last."""
        for _ in range(repeats):
            self._function(self._values).block_until_ready()
        return {}


def _compressed(name: str, values: jax.Array) -> jax.Array:
    axes = "all" if name.startswith("one axis") else AXES
    return dq.psum(
        values, axes, key=jax.random.key(0), method=dq.Compression(topology=name.split(", ")[1])
    )


def _count() -> int:
    return lax.axis_size(AXES)


def _next() -> list[tuple[int, int]]:
    return [(device, (device + 1) % _count()) for device in range(_count())]


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        serve(sys.argv[1], HostOfDevices)
    else:
        run(main, __doc__)
