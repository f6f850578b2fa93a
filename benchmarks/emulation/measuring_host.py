"""The process of one emulated host that measures an all-reduce with the others.

Command: `python -m benchmarks.emulation.measuring_host '{...}'`; `network` is the other end.
"""

import sys
import time
from typing import Any

import jax

from benchmarks.emulation.host import Host, serve
from dynamiq_jax._measurement import all_reduce
from dynamiq_jax._measurement.all_reduce import CompiledAllReduce
from dynamiq_jax._measurement.devices import barrier, make_mesh
from dynamiq_jax._measurement.settings import parse_setting
from pallas_kernels._jax.compat import override


class MeasuringHost(Host):
    """One worker of the all-reduce."""

    @override
    def join(self) -> dict[str, Any]:
        """Join the other hosts and draw this one's gradient."""
        answer = super().join()
        self._functions: dict[str, CompiledAllReduce] = {}
        self._mesh = make_mesh(jax.devices())
        size, seed = self.config["size"], self.config["seed"]
        self._gradients = all_reduce.make_gradients(self._mesh, size, seed)
        # One host compares with the truth; checksums tell that the others have the same.
        self._truth = all_reduce.exact_sum(self._mesh.size, size, seed) if self.index == 0 else None
        barrier()
        return answer

    def compile(self, setting: str) -> dict[str, Any]:
        """Compile a setting and check its result."""
        function = CompiledAllReduce(parse_setting(setting), self._mesh, self._gradients)
        barrier()
        result = function(self._gradients, self.config["seed"])
        self._functions[setting] = function
        error = None if self._truth is None else all_reduce.relative_error(result, self._truth)
        return {"checksums": all_reduce.checksums(result), "vnmse": error}

    def run(self, setting: str, seed: int) -> dict[str, Any]:
        """Time one all-reduce."""
        before = time.process_time()
        seconds = self._functions[setting].seconds(self._gradients, seed)
        return {"seconds": seconds, "cpu_seconds": time.process_time() - before}


if __name__ == "__main__":
    serve(sys.argv[1], MeasuringHost)
