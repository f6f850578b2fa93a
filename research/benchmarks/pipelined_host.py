"""The process of one emulated host of `research.benchmarks.pipelined`, which trains with others:
`python -m research.benchmarks.pipelined_host '{...}'`.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from benchmarks.emulation.host import Host, serve
from dynamiq_jax._measurement.devices import barrier
from dynamiq_research import Pipelined
from pallas_kernels._jax.compat import override


class PipelinedHost(Host):
    """One worker. Programs are a step, pipelined or not, and the parts of one."""

    @override
    def join(self) -> dict[str, Any]:
        """Join the other hosts and make parameters and a batch."""
        answer, config = super().join(), self.config
        self._mesh = jax.make_mesh((self.num_hosts,), ("data",), axis_types=(AxisType.Auto,))
        self._pipelined = Pipelined(
            optimizer=optax.adamw(1e-3),
            axis_name="data",
            method=dq.Compression(config["method"], bucket_bytes=config["bucket_bytes"]),
            clip_norm=1.0,
        )
        width = config["width"]
        specs = self._pipelined.state_specs

        def start() -> Any:
            keys = jax.random.split(jax.random.key(0), config["layers"])
            layers = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
            return self._pipelined.init(layers)

        rows = (self.num_hosts * config["rows"], width)
        split = NamedSharding(self._mesh, P("data"))
        self._x = jax.jit(lambda: jax.random.normal(jax.random.key(1), rows), out_shardings=split)()
        state = self._on_mesh(start, (), specs)()
        self._programs, self._args = self._make(specs, state)
        return answer

    def compile(self, part: str) -> dict[str, Any]:
        """Compile a program and run it once."""
        jax.block_until_ready(self._programs[part](*self._args[part]))
        return {}

    def run(self, part: str) -> dict[str, Any]:
        """Time a program."""
        barrier()
        start = time.perf_counter()
        jax.block_until_ready(self._programs[part](*self._args[part]))
        return {"seconds": time.perf_counter() - start}

    def _on_mesh(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped)

    def _make(self, specs: Any, state: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return programs and their arguments, by name."""
        pipelined = self._pipelined

        def loss(layers: Any, x: jax.Array) -> jax.Array:
            y = x
            for w in layers:
                y = y + jnp.tanh(y @ w)
            return jnp.mean(y**2)

        def own(params: Any) -> Any:
            return lax.pcast(params, "data", to="varying")

        def alone(function: Callable[..., Any], params: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda leaf: leaf[None], function(own(params), x))

        def scatter(updated: Any, grads: Any) -> Any:
            return pipelined.scatter(jax.tree.map(lambda leaf: leaf[0], grads), updated)

        def step(state: Any, x: jax.Array) -> Any:
            updated = pipelined.gather(state)
            return pipelined.scatter(jax.grad(loss)(own(updated.params), x), updated)

        def unpipelined(updated: Any, x: jax.Array) -> Any:
            return pipelined.gather(
                pipelined.scatter(jax.grad(loss)(own(updated.params), x), updated)
            )

        rows, whole = P("data"), P()
        programs = {
            "forward": self._on_mesh(functools.partial(alone, loss), (whole, rows), rows),
            "passes": self._on_mesh(functools.partial(alone, jax.grad(loss)), (whole, rows), rows),
            "scatter": self._on_mesh(scatter, (whole, rows), specs),
            "gather": self._on_mesh(pipelined.gather, (specs,), whole),
            "pipelined": self._on_mesh(step, (specs, rows), specs),
            "unpipelined": self._on_mesh(unpipelined, (whole, rows), whole),
        }
        updated = programs["gather"](state)
        grads = programs["passes"](updated.params, self._x)
        args = {
            "forward": (updated.params, self._x),
            "passes": (updated.params, self._x),
            "scatter": (updated, grads),
            "gather": (programs["scatter"](updated, grads),),
            "pipelined": (state, self._x),
            "unpipelined": (updated, self._x),
        }
        return programs, args


if __name__ == "__main__":
    serve(sys.argv[1], PipelinedHost)
