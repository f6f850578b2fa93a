"""One process for each emulated host, joined to the others."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.emulation import namespaces
from benchmarks.emulation.processes import Processes
from benchmarks.emulation.python_processes import python_command, python_environment
from dynamiq_jax._measurement.devices import START_TIMEOUT

_PORT = 9876  # of the coordinator; free in every fresh namespace


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Processes on emulated hosts; see `joined_hosts`."""

    network: namespaces.EmulatedNetwork
    processes: Processes
    timeout: float  # seconds without an answer after which all processes are ended
    joined: list[dict[str, Any]]  # what every host answered when it had joined the others

    def ask(
        self, request: dict[str, Any], doing: str, *, patience: float = 0.0
    ) -> list[dict[str, Any]]:
        """Send a request to all hosts and return their answers; see `Processes.ask`.

        Args:
          request: name of a method of the hosts, under "do", and its arguments.
          doing: what is done, in words, for errors.
          patience: seconds to wait beyond the time-out.
        """
        return self.processes.ask(request, timeout=self.timeout + patience, doing=doing)


@contextlib.contextmanager
def joined_hosts(
    num_hosts: int, module: str, config: Mapping[str, Any], *, timeout: float
) -> Iterator[Hosts]:
    """Emulate hosts with a process each, for the time of a `with` block.

    Args:
      num_hosts: number of hosts.
      module: program of a process, which serves a `host.Host`.
      config: what the program has to know, beside what every host has to.
      timeout: seconds without an answer after which all processes are ended.

    Raises:
      CommandError: a process ended, failed or did not answer in time.
    """
    with namespaces.emulated(num_hosts) as network:
        common = {
            **config,
            "parent": os.getpid(),
            "coordinator": f"{network.address(0)}:{_PORT}",
            "num_hosts": num_hosts,
        }
        commands = [
            network.command(host, python_command(module, json.dumps(common | {"host": host})))
            for host in range(num_hosts)
        ]
        with Processes(commands, python_environment(num_hosts)) as processes:
            joined = processes.ask({"do": "join"}, timeout=START_TIMEOUT, doing="joining")
            hosts = Hosts(network, processes, timeout, joined)
            yield hosts
            hosts.ask({"do": "stop"}, "stopping")


def link_patience(sent: float, rate: float | None) -> float:
    """Return the seconds to wait for `sent` bytes of every host at a rate, bits a second.

    That is five times the time of the link alone, since a shared one may be slow without being
    stuck.
    """
    return 0.0 if rate is None else 5 * 8 * sent / rate
