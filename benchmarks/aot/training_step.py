"""A data-parallel training step of a small model, scheduled for several GPUs, and the bytes that
travel while the backward pass computes.

Gradients are reduced in one bucket, in one for each layer after the backward pass as it is written,
or by casts of parameters, whose transposes are the sums: of all layers, or inside a scan over them.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import dynamiq_jax as dq
from benchmarks.aot.transfers import transfers_of
from benchmarks.error.plain_tables import print_table
from benchmarks.gpu import h200_model as h200
from dynamiq_jax.topologies import resolve_topology

TOPOLOGIES = (
    "exact",
    "ring",
    "ring:unroll=True",
    "ring:bidirectional=True:unroll=True",
    "butterfly",
    "all_to_all",
)

# Each layer has four matrices: eight matmuls in its backward pass.
_LAYERS, _MATRICES, _WIDTH, _ROWS = 4, 4, 2048, 8192
_SCANNED_LAYERS = 8
_MATRIX_BYTES = 4 * _WIDTH**2
# Of the bytes. Where buckets did not wait for each other it was 27 %.
_LEAST_SHARE, _LEAST_SHARE_OF_LOOP, _LEAST_SHARE_OF_SCAN = 0.6, 0.35, 0.35

_FORMS = {
    "after": "pmean of all gradients",
    "cast": "pcast of all parameters",
    "scan": "pcast in the body of a scan",
    "carried": "pcast in the body of a scan, of the next layer",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step: path of the gradients, how they are taken, buckets, and options of XLA."""

    topology: str  # or "exact"
    form: str  # of _FORMS
    matrices: int  # in a bucket; all of them, or a part of a layer
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return _SCANNED_LAYERS if self.is_scan else _LAYERS

    @property
    def is_scan(self) -> bool:
        """Whether layers are a scan."""
        return self.form in ("scan", "carried")


def cases(topologies: Sequence[str]) -> list[Case]:
    """Return steps with a bucket for each layer and with one for all; exact sums go by matrix."""
    both = (("xla_gpu_experimental_parallel_collective_overlap_limit", 2),)
    result = []
    for name in topologies:
        if name == "exact":
            result += [Case(name, form, 1) for form in ("after", "scan", "carried")]
            continue
        if ":" not in name:
            result.append(Case(name, "after", _LAYERS * _MATRICES))
        result.append(Case(name, "after", _MATRICES, both if "bidirectional" in name else ()))
        if name in ("ring:unroll=True", "all_to_all"):
            result += [Case(name, "cast", _MATRICES), Case(name, "scan", 1)]
            result.append(Case(name, "carried", _MATRICES))
    return result


def examine(case: Case, workers: int, dump: Path) -> dict[str, Any]:
    """Compile one training step: a row of the table."""
    split, whole = PartitionSpec("data"), PartitionSpec()
    program = h200.compile_for(
        h200.mesh(workers, "data"),
        jax.shard_map(_step(case), in_specs=(whole, split, whole), out_specs=whole),
        [
            _parameters(case),
            jax.ShapeDtypeStruct((workers * _ROWS, _WIDTH), "bfloat16"),
            jax.ShapeDtypeStruct((2,), "uint32"),
        ],
        [whole, split, whole],
        dump=dump,
        options=dict(case.options),
    )
    transfers = list(
        transfers_of(program, lambda instruction: instruction.matmul and instruction.backward)
    )
    total = sum(transfer.bytes for transfer in transfers)
    under = [transfer for transfer in transfers if transfer.covered]
    share = sum(transfer.bytes for transfer in under) / total
    return {
        "topology": case.topology,
        "form": case.form,
        "layers": case.layers,
        "matrices_per_bucket": case.matrices,
        "options": dict(case.options),
        "transfers": sum(transfer.times for transfer in transfers),
        "transfers_in_loops": sum(transfer.times for transfer in transfers if transfer.in_loop),
        "transfers_under_matmul": sum(transfer.times for transfer in under),
        "share_of_bytes_under_matmul": share,
        "problems": _problems(case, program, share),
    }


def _problems(case: Case, program: h200.Program, share: float) -> list[str]:
    if case.form == "carried":  # shown for what XLA does with it: nothing travels under a matmul
        return []
    least = _LEAST_SHARE_OF_LOOP if case.topology == "ring" else _LEAST_SHARE
    least = _LEAST_SHARE_OF_SCAN if case.is_scan else least
    one_bucket = case.matrices == case.layers * _MATRICES
    problems = {
        f"sends only {share:.0%} of the bytes under a matmul": not one_bucket and share < least,
        f"sends {share:.0%} of the bytes under a matmul, with one bucket?": (
            one_bucket and share > 0
        ),
    }
    if not case.is_scan:
        count = 2 * case.layers * _MATRICES
        matmuls = sum(i.matmul and i.backward for i in program.computations[program.entry])
        text = f"has {matmuls} matmuls in its backward pass, not {count - 1} or {count}"
        problems[text] = not count - 1 <= matmuls <= count
    return [text for text, wrong in problems.items() if wrong]


def print_steps(rows: list[dict[str, Any]], workers: int) -> None:
    """Print a table of what travels under the backward pass, if anything was compiled."""
    if rows:
        print_table(
            f"Training step on {workers} H200: transfers under a matmul of the backward pass",
            "form,matrices a bucket,transfers,in loops,under a matmul,of the bytes,options of XLA",
            [
                [
                    row["topology"],
                    row["form"],
                    str(row["matrices_per_bucket"]),
                    str(row["transfers"]),
                    str(row["transfers_in_loops"]),
                    str(row["transfers_under_matmul"]),
                    f"{row['share_of_bytes_under_matmul']:.0%}",
                    _options(row),
                ]
                for row in rows
            ],
        )
        for form, text in _FORMS.items():
            print(f"{form}: {text}")


def _parameters(case: Case) -> list[Any]:
    """Return the layers, each a list of matrices; for a scan, matrices of all layers together."""
    if case.is_scan:
        return [jax.ShapeDtypeStruct((case.layers, _WIDTH, _WIDTH), "float32")] * _MATRICES
    return [[jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")] * _MATRICES] * case.layers


def _layer(x: jax.Array, matrices: Sequence[jax.Array]) -> jax.Array:
    for into, out in zip(matrices[::2], matrices[1::2], strict=True):
        hidden = jax.nn.relu(x @ into.astype(x.dtype))
        x = x + hidden @ out.astype(x.dtype)
    return x


def _step(case: Case) -> Any:
    arguments: dict[str, Any] = {}
    if case.topology != "exact":
        arguments = {
            "method": dq.DynamiQ(implementation="triton"),
            "topology": resolve_topology(case.topology),
            "options": dq.Options(bucket_bytes=case.matrices * _MATRIX_BYTES, bucketing="in_order"),
        }

    def cast(matrices: Any, key: jax.Array) -> Any:
        """Make gradients the sums over the workers, where a form takes them by a transpose."""
        if case.form == "after":
            return matrices
        if not arguments:
            return lax.pcast(matrices, "data", to="varying")
        return dq.pcast(matrices, "data", to="varying", key=key, **arguments)

    def run(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        """Run the layers, each of which is cast."""
        numbers = jnp.arange(case.layers)
        if case.form == "scan":

            def body(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
                matrices, number = each
                return _layer(x, cast(matrices, jax.random.fold_in(key, number))), None

            return lax.scan(body, x, (params, numbers))[0]
        if case.form == "carried":  # so a gradient is reduced in the turn after its own

            def pipelined(carry: Any, each: Any) -> tuple[Any, None]:
                x, own = carry
                matrices, number = each
                return (_layer(x, own), cast(matrices, jax.random.fold_in(key, number))), None

            first, others = [leaf[0] for leaf in params], [leaf[1:] for leaf in params]
            start = x, cast(first, jax.random.fold_in(key, 0))
            (x, last), _ = lax.scan(pipelined, start, (others, numbers[1:]))
            return _layer(x, last)
        for matrices in cast(params, key):
            x = _layer(x, matrices)
        return x

    def step(params: Any, x: jax.Array, key_data: jax.Array) -> Any:
        key = jax.random.wrap_key_data(key_data)

        def loss(params: Any) -> jax.Array:
            value = jnp.mean(run(params, x, key).astype(jnp.float32) ** 2)
            return value if case.form == "after" else lax.pmean(value, "data")

        if case.form == "after":
            own = jax.grad(loss)(lax.pcast(params, "data", to="varying"))
            mean = (
                dq.pmean(own, "data", key=key, **arguments) if arguments else lax.pmean(own, "data")
            )
        else:
            mean = jax.grad(loss)(params)
        return jax.tree.map(lambda param, gradient: param - 0.1 * gradient, params, mean)

    return step


def _options(row: dict[str, Any]) -> str:
    named = row["options"].items()
    return ", ".join(f"{key.rpartition('_collective_')[2]}={value}" for key, value in named) or "-"
