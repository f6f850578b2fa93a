"""The process of one emulated host, which does what it reads from standard input.

It joins the others through `jax.distributed` over gloo. Requests and answers are JSON objects, one
a line; `processes` is the other end.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

import dynamiq_jax as dq
from benchmarks.emulation.processes import die_with_parent
from dynamiq_jax._console.environment import of_cpu_programs
from dynamiq_jax._measurement import devices


class Host:
    """One of several emulated hosts. The requests are the methods of a subclass, by name."""

    def __init__(self, config: dict[str, Any]):
        dq.keep_memory()  # for all settings alike
        self.config = config
        self.index: int = config["host"]
        self.num_hosts: int = config["num_hosts"]

    def join(self) -> dict[str, Any]:
        """Join the other hosts, with one CPU device each if the configuration has no number."""
        jax.config.update("jax_num_cpu_devices", self.config.get("devices", 1))
        devices.join(self.config["coordinator"], self.num_hosts, self.index)
        return {"device": jax.devices()[0].device_kind, **of_cpu_programs()}

    def stop(self) -> dict[str, Any]:
        """Leave the others in order, after which this process may be ended at any time."""
        jax.distributed.shutdown()
        return {}


def take_long_turns() -> None:
    """Keep this thread, and those that it starts, from interrupting other hosts.

    Emulated hosts share the cores of one machine. Threads wake up for every message. By the usual
    policy of Linux, one that wakes up takes a core from another host at once: a mean of 64 Ki
    coordinates on four hosts and two cores then took 8 ms with BF16, 19 ms with DynamiQ. With this
    policy it takes 1.3 and 3.0 ms. Hosts with cores of their own have no such interruptions.
    """
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def serve(argument: str, make_host: Callable[[dict[str, Any]], Host]) -> None:
    """Answer requests until the command that started this process is gone.

    Args:
      argument: JSON of the configuration; "parent" is the id of the command's process.
      make_host: makes the host of a configuration. The "do" of a request names its method, the rest
        are the arguments, and what the method returns is the answer.
    """
    config = json.loads(argument)
    die_with_parent(config["parent"])
    take_long_turns()
    # gloo and XLA write to standard output; answers go where nobody else writes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**content: Any) -> None:
        print(json.dumps(content), file=answers, flush=True)

    try:
        host = make_host(config)
        for line in sys.stdin:
            request = json.loads(line)
            answer(**getattr(host, request.pop("do"))(**request))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        os._exit(1)  # an orderly exit would wait for the others
