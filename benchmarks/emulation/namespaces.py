"""Emulated hosts: one network namespace each, on a bridge, with a rate limit in both directions.

A host has one interface, eth0 at 10.77.0.(1 + index), and a hosts file in which the machine's own
name stands for that address: gloo binds to whatever the host name resolves to. The addresses exist
only inside the namespaces, so runs do not meet, and there is no route off the machine.

Names carry the process that made them: dynamiq-PID-START-hub, dynamiq-PID-START-0, .... START, the
kernel's start time of that process, tells a run that was killed from a later process with its id.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from dynamiq_jax._console.errors import CommandError

MAX_HOSTS = 250  # addresses of one /24

_NAME = re.compile(r"dynamiq-(\d+)-(\d+)-(hub|\d+)")
_HOSTS_FILES = Path("/etc/netns")  # where `ip netns exec` looks for a host's own /etc
# An idle link saves up for a bucket of bytes that it then sends at once, which flatters messages;
# but a segment-offloaded packet that does not fit is split by this machine's cores, at ten times
# the CPU time. So packets of half a millisecond, within what kernels do, and a bucket for one.
_OFFLOAD_SECONDS, _OFFLOAD_BYTES = 0.5e-3, (16 * 1024, 64 * 1024)
_BUCKET = 1.12  # of a packet: its segments' headers count too
_QUEUE_MS = 50  # of a full link; more is dropped


def check_possible() -> None:
    """Raise CommandError unless this is Linux, the user is root and iproute2 is installed."""
    if not hasattr(os, "geteuid") or not Path("/proc/self/ns/net").exists():
        raise CommandError("emulated hosts need Linux network namespaces: run this on Linux.")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise CommandError(
            f"{' and '.join(missing)} not found: install iproute2, for example with "
            "`apt-get install iproute2`."
        )
    if os.geteuid() != 0:
        raise CommandError(
            f"network namespaces need root, and this runs as user {os.geteuid()}: run it with "
            "sudo, or in a container started with --privileged."
        )


def remove_stale() -> list[str]:
    """Remove what killed runs left behind, and return the names of those namespaces."""
    stale = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match and _start_time(int(match[1])) != int(match[2]):
            stale.append(name)
    _remove(stale)
    return stale


@contextlib.contextmanager
def emulated(num_hosts: int) -> Iterator["EmulatedNetwork"]:
    """Emulate hosts on one bridge, for the time of a `with` block. Links start unlimited.

    with emulated(4) as network:
        network.set_rate(200e6)
        subprocess.run(network.command(0, ["ping", "-c1", network.address(1)]))
    """
    network = EmulatedNetwork(num_hosts)
    try:
        network.make()
        yield network
    finally:
        network.remove()


class EmulatedNetwork:
    """Emulated hosts of this process, on one bridge."""

    def __init__(self, num_hosts: int):
        self.num_hosts = num_hosts
        self._prefix = f"dynamiq-{os.getpid()}-{_start_time(os.getpid())}-"
        self._hub = self._prefix + "hub"

    def make(self) -> None:
        """Make namespaces, bridge, links and hosts files."""
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        for host in range(self.num_hosts):
            name, port = self._name(host), f"host{host}"
            _run("ip", "netns", "add", name)
            link = ["link", "add", "eth0", "netns", name]
            _run("ip", *link, "type", "veth", "peer", "name", port, "netns", self._hub)
            _run("ip", "-n", self._hub, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            folder = _HOSTS_FILES / name
            folder.mkdir(parents=True)
            names = f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n"
            (folder / "hosts").write_text(names)
        self.set_rate(None)

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return f"10.77.0.{host + 1}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Return a command line that runs `command` on a host, in the same process."""
        return ["ip", "netns", "exec", self._name(host), *command]

    def set_rate(self, bits_per_second: float | None) -> None:
        """Limit what every host sends and what it receives; None lifts the limit."""
        offload = _OFFLOAD_BYTES[1]
        discipline = ["pfifo"]  # instead of no queue at all: it counts bytes
        if bits_per_second is not None:
            wanted = int(bits_per_second / 8 * _OFFLOAD_SECONDS)
            offload = min(max(wanted, _OFFLOAD_BYTES[0]), _OFFLOAD_BYTES[1])
            bucket = max(offload, wanted) * _BUCKET
            discipline = ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{bucket:.0f}b"]
            discipline += ["latency", f"{_QUEUE_MS}ms"]
        for host in range(self.num_hosts):
            name = self._name(host)
            _run("ip", "-n", name, "link", "set", "eth0", "gso_max_size", str(offload))
            # Connections look at it again when their route is looked up again.
            _run("ip", "-n", name, "route", "flush", "cache")
            for namespace, device in ((name, "eth0"), (self._hub, f"host{host}")):
                where = ["-n", namespace, "qdisc", "replace", "dev", device, "root"]
                _run("tc", *where, *discipline)

    def bytes_sent(self) -> list[int]:
        """Count the bytes that went through every host's interface since the last `set_rate`.

        The queueing discipline counts them, with Ethernet, IP and TCP headers of every packet on
        the wire. The interface's own counter sees segment-offloaded packets of up to 64 KiB before
        they are split, and misses most headers.
        """
        counts = []
        for host in range(self.num_hosts):
            shown = _run("tc", "-n", self._name(host), "-s", "-j", "qdisc", "show", "dev", "eth0")
            counts.append(next(int(entry["bytes"]) for entry in json.loads(shown)))
        return counts

    def remove(self) -> None:
        """Remove everything this process made, and end what still runs there."""
        _remove([name for name in _namespaces() if name.startswith(self._prefix)])

    def _name(self, host: int) -> str:
        return f"{self._prefix}{host}"


def _namespaces() -> list[str]:
    """Return the names of all network namespaces of the machine."""
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove(names: list[str]) -> None:
    for name in names:
        # A process keeps its namespace alive after the name is gone.
        for process in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
        shutil.rmtree(_HOSTS_FILES / name, ignore_errors=True)


def _start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    return int(fields.rpartition(")")[2].split()[19])  # the name, in brackets, may hold anything


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}. Containers need --privileged; "
            "the kernel needs veth, bridge and sch_tbf."
        )
    return done.stdout
