"""Record what calls of the library return, bit for bit, and which collectives they compile to.

    python -m benchmarks.recorded_calls --output after.json
    PYTHONPATH=/path/to/earlier:. python -P -m benchmarks.recorded_calls --output before.json
    python -m benchmarks.recorded_calls --compare before.json after.json

A change that must not alter results is recorded before and after it on one machine. The script
needs nothing but the library, and spells each call in the way that the library in use understands,
so that it runs from commits before and after a change of the interface.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax import methods, topologies

KEY = 7
APART = ("bucket_bytes", 1), ("bucketing", "in_order")  # a bucket for each leaf
KINDS = ("collective-permute", "all-to-all", "all-gather", "all-reduce", "reduce-scatter")


def choice_of(
    function: Callable[..., Any], method: Any, topology: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """Spell a choice as this version of the library takes it: one value, or several keywords."""
    kind = getattr(dq, "Compression", None) or dq.Options
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in options.items() if name in known}
    if hasattr(dq, "Compression"):
        return {"method": dq.Compression(method, topology, **fields)}
    if fields and "options" in inspect.signature(function).parameters:
        fields = {"options": kind(**fields)}
    routed = {"topology": topology} if function is not dq.all_gather else {}
    return {"method": method, **routed, **fields}


# By name, so that a method may move from one package to another.
NAMES = (
    *("paper", "exact", "bf16", "blockint", "blockint:4:rounding=stochastic", "equarx", "qgz"),
    *("mxfp8", "mxfp6", "mxfp4", "mxint8", "flash_communication", "thc", "thc:6:block=1024"),
    *("flash_communication:3:spikes=False", "topk_chunked", "powersgd", "omnireduce"),
    *(
        "entropy_coded",
        "entropy_coded:coder=patched",
        "arc_top_k",
        "top_k",
        "rand_k",
        "split_sketch",
    ),
    *("marsit", "ef+dynamiq:4", "ef+bf16", "ef+topk_chunked:2", "ef+omnireduce", "ef+thc"),
    *(
        "ef+blockint",
        "ef+arc_top_k",
        "ef+top_k",
        "ef+split_sketch",
        "ef21m+topk_chunked:2:inner=exact",
    ),
    *("ef21m+arc_top_k:1:inner=exact", "gc+marsit"),
)
METHODS = {
    "dynamiq": dq.DynamiQ(),
    "dynamiq:3": dq.DynamiQ(bits=3.0),
    "dynamiq:4": dq.DynamiQ(bits=4.0),
    "dynamiq:8.5": dq.DynamiQ(bits=8.5),
    "dynamiq 4, 8": dq.DynamiQ(bits=6.0, widths=(4, 8)),
    "dynamiq nearest": dq.DynamiQ(rounding="nearest"),
    "dynamiq independent": dq.DynamiQ(rounding="independent"),
    "dynamiq groups of 8": dq.DynamiQ(bits=6.0, group_size=8),
    "dynamiq uniform": dq.DynamiQ(gap_ratio=1),
    "mxfp8 e5m2": methods.MXFP8(element="e5m2"),
} | {name: methods.resolve_method(name) for name in NAMES}
METHODS["ef+powersgd"] = methods.resolve_method("ef+powersgd:rank=2")
NEEDS_STATE = ("powersgd", "omnireduce", "split_sketch", "ef+", "ef21m+", "gc+")
TOPOLOGIES = {
    "ring": topologies.Ring(),
    "unrolled": topologies.Ring(unroll=True),
    "butterfly": topologies.Butterfly(),
    "all_to_all": topologies.AllToAll(),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: a function, how it compresses, over how many workers, on which tree."""

    function: str
    method: str
    topology: str = "ring"
    workers: int = 4
    tree: str = "small"
    check_vma: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Name of the case in the record."""
        extra = [f"{k}={v}" for k, v in self.options] + ([] if self.check_vma else ["no vma"])
        parts = [self.function, self.method, self.topology, f"n={self.workers}", self.tree, *extra]
        return ", ".join(parts)


def rows(seed: int, count: int, size: int) -> np.ndarray:
    """float32 [count, size]: rows of 256 of lognormal magnitude."""
    rng = np.random.default_rng(seed)
    magnitudes = np.exp2(2.5 * rng.standard_normal((1, -(-size // 256), 1)))
    parts = magnitudes * rng.standard_normal((count, magnitudes.shape[1], 256))
    return (1e-3 * parts).reshape(count, -1)[:, :size].astype(np.float32)


def make_tree(name: str, workers: int) -> dict[str, Any]:
    """Gradients [workers, *shape] by leaf."""
    kernel = rows(1, workers, 96 * 256).reshape(workers, 96, 256)
    if name == "small":
        return {"kernel": kernel}
    if name == "bfloat16":
        return {"kernel": jnp.asarray(kernel, jnp.bfloat16)}
    if name == "float16":
        return {"kernel": jnp.asarray(kernel, jnp.float16)}
    if name == "hostile":
        bad = kernel.copy()
        bad[0, 3, 7], bad[workers - 1, 40, 200], bad[:, 60] = np.nan, np.inf, 0
        bad[:, 70], bad[:, 71] = bad[:, 70] * 1e-30, bad[:, 71] * 1e30
        return {"kernel": bad}
    assert name == "mixed"
    return {
        "a": rows(2, workers, 64 * 84).reshape(workers, 64, 84),
        "b": jnp.asarray(rows(3, workers, 8 * 1200).reshape(workers, 8, 1200), jnp.bfloat16),
        "bias": rows(4, workers, 64),
        "c": rows(5, workers, 16 * 700).reshape(workers, 16, 700),
        "count": np.arange(workers * 32, dtype=np.int32).reshape(workers, 32),
        "flags": np.arange(workers * 16).reshape(workers, 16) % 5 == 0,
        "half": jnp.asarray(rows(6, workers, 32 * 64).reshape(workers, 32, 64), jnp.float16),
    }


def cases() -> list[Case]:
    """All calls that are recorded."""
    known = []
    for method in METHODS:
        stateful = method.startswith(NEEDS_STATE)
        function = "all_reduce_gradients" if stateful else "psum"
        known += [Case(function, method), Case(function, method, "all_to_all")]
    for topology in TOPOLOGIES:
        known += [Case("pmean", m, topology, 8, "mixed") for m in ("dynamiq", "bf16", "thc")]
        known += [Case("psum_scatter", m, topology) for m in ("dynamiq", "exact", "thc", "mxfp8")]
    for dtype in ("bfloat16", "float16", "hostile"):
        known += [Case("pmean", m, tree=dtype) for m in ("dynamiq", "paper", "mxfp6", "blockint")]
    known += [
        Case("all_gather", m, tree=tree)
        for m in ("dynamiq", "bf16", "exact", "thc", "mxfp4", "blockint:4:rounding=stochastic")
        for tree in ("small", "mixed")
    ]
    known += [Case("psum_scatter", m, tree="mixed") for m in ("dynamiq", "bf16", "mxfp8")]
    known += [
        Case("all_gather axis=-1", "dynamiq", tree="mixed"),
        Case("psum_scatter dimension=1", "dynamiq", tree="mixed"),
        Case("compress", "dynamiq"),
        Case("compress", "exact", "butterfly"),
        Case("psum over two axes", "dynamiq", workers=8, tree="mixed"),
        Case("psum over two axes", "thc", workers=8, tree="mixed"),
        Case("all_reduce_gradients over two axes", "ef+powersgd", workers=8, tree="mixed"),
        Case("pmean", "dynamiq", workers=3, tree="mixed"),
        Case("pmean", "dynamiq", workers=1, tree="mixed"),
        Case("psum", "dynamiq", check_vma=False),
        Case("psum", "dynamiq", tree="mixed", options=APART),
        Case("psum", "dynamiq", tree="mixed", options=(("exact_below", 0),)),
        Case("psum", "dynamiq", tree="mixed", options=(("exact leaf", "a"),)),
        Case("all_reduce_gradients", "ef+powersgd", tree="mixed", options=APART),
    ]
    return known


def program(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The case as a compiled function, and its arguments."""
    if case.function == "compress":
        return global_step(case)
    two_axes = "two axes" in case.function
    axes: Any = ("hosts", "local") if two_axes else "data"
    shape = (2, case.workers // 2) if two_axes else (case.workers,)
    names = axes if two_axes else (axes,)
    devices = jax.devices()[: case.workers]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)
    tree = make_tree(case.tree, case.workers)
    options = dict(case.options)

    def local(stacked: Any) -> Any:
        mine = jax.tree.map(lambda leaf: leaf[0], stacked)
        result = reduce(case, mine, axes, options)
        return jax.tree.map(lambda leaf: leaf[None], result)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=case.check_vma
    )
    return jax.jit(mapped), (tree,)


def reduce(case: Case, mine: Any, axes: Any, options: dict[str, Any]) -> Any:
    """The call itself, on one worker."""
    name, key = case.function.split()[0], jax.random.key(KEY)
    function, method = getattr(dq, name), METHODS[case.method]
    exact = options.get("exact leaf")
    options = {name: value for name, value in options.items() if name != "exact leaf"}
    if exact:
        method = {f"^{exact}$": _left_to_jax(), ".*": method}
    topology = TOPOLOGIES.get(case.topology, case.topology)
    arguments = choice_of(function, method, topology, options)
    if name == "all_reduce_gradients":
        transformation = function(axes, seed=3, **arguments)
        state, results = transformation.init(mine), []
        for step in range(3):
            scaled = jax.tree.map(lambda leaf, s=step: leaf * jnp.asarray(1 + s, leaf.dtype), mine)
            update, state = transformation.update(scaled, state)
            results.append(update)
        return results
    if name in ("psum_scatter", "all_gather"):
        arguments["tiled"] = True
    if "axis=-1" in case.function:
        arguments["axis"] = -1
    if "dimension=1" in case.function:
        arguments["scatter_dimension"] = 1
        mine = {name: leaf for name, leaf in mine.items() if leaf.ndim > 1}
    return function(mine, axes, key=key, **arguments)


def _left_to_jax() -> str:
    """The name in a policy of leaves that the collectives of JAX sum."""
    from dynamiq_jax._inputs import policy

    return getattr(policy, "UNCOMPRESSED", "exact")


def global_step(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Loss and gradients of a small network, of which the compiler splits the rows."""
    mesh = jax.make_mesh(
        (case.workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
    )
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((64, 96)).astype(np.float32), "b": np.zeros(96, np.float32)}
    x = rng.standard_normal((32, 64)).astype(np.float32)
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    step = dq.compress(
        jax.jit(jax.value_and_grad(loss)),
        "data",
        method=dq.Compression(METHODS[case.method], TOPOLOGIES[case.topology]),
        key=lambda params, x: jax.random.key(KEY),
    )
    return step, (params, x)


def collectives(hlo: str) -> list[str]:
    """List kind, dtype, size and place of every result of a collective in a compiled program."""
    computation, lines = "", []
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    for line in hlo.splitlines():
        opening = re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{", line)
        computation = opening.group(1) if opening else computation
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
        if match:
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
                size = math.prod(int(dim) for dim in dims.split(",") if dim)
                looped = " in a loop" * (computation in bodies)
                lines.append(f"{match.group(2)} {dtype} x {size}{looped}")
    return sorted(lines)


def record(case: Case) -> dict[str, Any]:
    """Digest of the results and the collectives of one case."""
    function, arguments = program(case)
    compiled = function.lower(*arguments).compile()
    leaves = jax.tree.leaves(compiled(*arguments))
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(str((leaf.shape, str(leaf.dtype))).encode())
        digest.update(np.asarray(leaf).tobytes())
    return {"bits": digest.hexdigest()[:32], "collectives": collectives(compiled.as_text())}


def compare(before: Path, after: Path) -> int:
    """Print what differs between two records; return the exit status."""
    old, new = (json.loads(path.read_text())["calls"] for path in (before, after))
    common = [name for name in old if name in new]
    bits = [name for name in common if old[name]["bits"] != new[name]["bits"]]
    wire = [name for name in common if old[name]["collectives"] != new[name]["collectives"]]
    for name in sorted(old.keys() ^ new.keys()):
        print(f"only in one record: {name}")
    for name in bits:
        print(f"other bits: {name}")
    for name in wire:
        print(
            f"other collectives: {name}\n  {old[name]['collectives']}\n  {new[name]['collectives']}"
        )
    print(
        f"{len(common)} calls in both: {len(common) - len(bits)} with the same bits, "
        f"{len(common) - len(wire)} with the same collectives"
    )
    return int(bool(bits or wire or old.keys() != new.keys()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the record to this file")
    parser.add_argument("--only", default="", help="record only calls whose name contains this")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    jax.config.update("jax_num_cpu_devices", 8)
    calls = {}
    for case in cases():
        if options.only in case.name:
            calls[case.name] = record(case)
            print(f"{calls[case.name]['bits'][:12]}  {case.name}", flush=True)
    content = {"library": str(Path(dq.__file__).parent), "jax": jax.__version__, "calls": calls}
    if options.output:
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
