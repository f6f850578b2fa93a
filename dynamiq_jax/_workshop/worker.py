"""The process of one emulated host: `python -m dynamiq_jax._workshop.worker '{...}'`.

Joins the others through `jax.distributed` over gloo, then does what it reads from standard input,
one JSON object a line. See `processes.py` for the other end and `network.py` for what is asked.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from dynamiq_jax._workshop.processes import die_with_parent


def serve(argument: str, make_host: Callable[[dict[str, Any]], Any]) -> None:
    """Answers until told to stop or until the command is gone.

    Args:
      argument: JSON of the process's configuration; "parent" is the id of the command's process.
      make_host: makes of it what answers: a request's "do" names the method, the rest are its
        arguments, and what it returns is the answer.
    """
    config = json.loads(argument)
    die_with_parent(config["parent"])
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


class _Host:
    """What can be asked of a host, by the name of the method."""

    def __init__(self, config: dict[str, Any]):
        self._config = config
        self._functions: dict[str, Any] = {}

    def join(self) -> dict[str, Any]:
        """Joins the others and makes this host's gradient."""
        import jax

        from dynamiq_jax._workshop import joining, measure

        config = self._config
        jax.config.update("jax_num_cpu_devices", 1)
        joining.join(config["coordinator"], config["num_hosts"], config["host"])
        self._mesh = measure.make_mesh(jax.devices())
        size, seed = config["size"], config["seed"]
        self._gradients = measure.make_gradients(self._mesh, size, seed)
        # One host compares with the truth; that the others have the same, checksums tell.
        self._truth = (
            measure.exact_sum(self._mesh.size, size, seed) if config["host"] == 0 else None
        )
        measure.barrier()
        return {"device": jax.devices()[0].device_kind}

    def compile(self, setting: str) -> dict[str, Any]:
        """Compiles a setting and checks its result."""
        from dynamiq_jax._workshop import measure
        from dynamiq_jax._workshop.settings import parse_setting

        function = measure.AllReduce(parse_setting(setting), self._mesh, self._gradients)
        measure.barrier()
        result = function(self._config["seed"])
        self._functions[setting] = function
        error = None if self._truth is None else measure.relative_error(result, self._truth)
        return {"checksums": measure.checksums(result), "vnmse": error}

    def run(self, setting: str, seed: int) -> dict[str, Any]:
        """Times one all-reduce."""
        before = time.process_time()
        seconds = self._functions[setting].seconds(seed)
        return {"seconds": seconds, "cpu_seconds": time.process_time() - before}

    def stop(self) -> dict[str, Any]:
        """Leaves the others in order, after which it may be ended at any time."""
        import jax

        jax.distributed.shutdown()
        return {}


if __name__ == "__main__":
    serve(sys.argv[1], _Host)
