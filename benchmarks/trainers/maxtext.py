"""MaxText 0.2.5, trained exact and with compressed gradients: losses, bytes between workers, time.

    python -m benchmarks.trainers.maxtext

Runs in an environment of its own, see `maxtext-requirements.txt` beside this file. Workers are
virtual devices of this machine. Every run is a process of its own, which calls the training loop of
MaxText; compressed runs call `maxtext_hook` before. Bytes are those of the compiled training step.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tokenize
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.speed.mesh_bytes import sent_by_axes

NUM_DEVICES, FRAGMENTS = 8, 3
MODEL: dict[str, Any] = {
    "base_emb_dim": 128,
    "base_mlp_dim": 256,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_target_length": 64,
    "per_device_batch_size": 2,
    "learning_rate": 3e-4,
}
MACHINE: dict[str, Any] = {
    "hardware": "cpu",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "jax_cache_dir": "",
    "skip_jax_distributed_system": "true",
}
_MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 4}
_REPLICAS = {"ici_diloco_parallelism": 2, "ici_fsdp_parallelism": 4, "enable_diloco": "true"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A way to train."""

    title: str
    axis: str  # of the workers
    options: dict[str, Any]  # of MaxText
    hook: str  # function of `maxtext_hook`
    is_flash: bool = False  # attention by the kernel that MaxText has for TPUs, interpreted


RUNS = {
    "data": Run("data, fsdp", "data", _MESH, "compress_gradients"),
    "fast": Run("the same at 1e-3", "data", _MESH | {"learning_rate": 1e-3}, "compress_gradients"),
    "flash": Run(
        "flash attention",
        "data",
        _MESH | {"attention": "flash", "max_target_length": 128},
        "compress_gradients",
        is_flash=True,
    ),
    "experts": Run(
        "mixture of experts, ragged dot",
        "data",
        _MESH
        | {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
        | {"base_moe_mlp_dim": 256, "sparse_matmul": "true", "megablox": "false"},
        "compress_gradients",
    ),
    "tensor": Run(
        "data, fsdp, tensor",
        "data",
        _MESH | {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        "compress_gradients",
    ),
    "accumulation": Run(
        "micro-batches",
        "data",
        _MESH | {"gradient_accumulation_steps": 2, "per_device_batch_size": 1},
        "compress_gradients",
    ),
    "diloco": Run(
        "DiLoCo", "diloco", _REPLICAS | {"diloco_sync_period": 2 * FRAGMENTS}, "compress_diloco"
    ),
    "streaming": Run(
        "streaming DiLoCo",
        "diloco",
        _REPLICAS
        | {"enable_streaming_diloco": "true", "num_diloco_fragments": FRAGMENTS}
        | {"diloco_sync_period": 2 * FRAGMENTS},
        "compress_diloco",
    ),
}


def main() -> None:
    """Train in every way, write the result and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: 20)")
    parser.add_argument("--method", default="dynamiq", help="compression (default: dynamiq)")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), help="what to train (default: all)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=files.path_of("maxtext"),
        help="result file (default: benchmarks/results/maxtext.json)",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a run of this process alone
    args = parser.parse_args()
    if args.one:
        name, method = args.one.split(",")
        args.out.write_text(json.dumps(train_here(RUNS[name], method, args.steps)))
        return
    console = Console()
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Training", total=2 * len(args.runs))
        for name in args.runs:
            row: dict[str, Any] = {"run": name, "title": RUNS[name].title, "axis": RUNS[name].axis}
            for kind, method in (("exact", ""), ("compressed", args.method)):
                progress.update(task, description=f"{RUNS[name].title}, {kind}")
                row[kind] = train(name, method, args.steps)
                progress.advance(task)
            results.append(row | compare(row))
    config = {"steps": args.steps, "method": args.method, "model": MODEL, "maxtext": MACHINE}
    config["runs"] = {name: RUNS[name].options for name in args.runs}
    versions = results[0]["exact"].pop("versions")
    for row in results:
        for kind in ("exact", "compressed"):
            row[kind].pop("versions", None)
    hook = Path(__file__).with_name("maxtext_hook.py")
    config |= {"versions": versions, "lines_of_hook": code_lines(hook.read_text())}
    path = files.write(args.out, config, results)
    console.print(as_table(results))
    console.print(f"Lines of the hook: {config['lines_of_hook']}. Wrote {path}")


def train(name: str, method: str, steps: int) -> dict[str, Any]:
    """Train in a process of its own, and return what it measured."""
    environment = os.environ | {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    }
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", __spec__.name, "--one", f"{name},{method}"]
        command += ["--steps", str(steps), "--out", str(out)]
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(
                f"The run {name} failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
            )
        return json.loads(out.read_text()) | {"seconds": seconds}


def train_here(run: Run, method: str, steps: int) -> dict[str, Any]:
    """Train with MaxText in this process.

    Args:
      run: what to train.
      method: compression method; empty for MaxText as it is.
      steps: training steps.
    """
    import maxtext
    from maxtext.trainers.pre_train import train as trainer

    from benchmarks.trainers import maxtext_hook

    if run.is_flash:
        _interpret_flash_attention()
    programs = _record_programs()
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.json"
        options = MACHINE | MODEL | run.options
        options |= {"steps": steps, "run_name": "benchmark", "base_output_directory": folder}
        options |= {"metrics_file": metrics}
        base = Path(inspect.getfile(maxtext)).parent / "configs" / "base.yml"
        arguments = [f"{key}={value}" for key, value in options.items()]
        config, recorder = trainer.initialize(["", str(base), *arguments])
        if method:
            getattr(maxtext_hook, run.hook)(config, method=method)
        trainer.run(config, recorder)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (lowered, compiled, compile_seconds), *others = programs
    assert not others, "MaxText compiles the training step once"
    return {
        "losses": [mean_loss(line) for line in lines],
        "step_seconds": float(np.median([line["perf/step_time_seconds"] for line in lines[2:]])),
        "compile_seconds": compile_seconds,
        **count_bytes(run, compiled),
        "wire_reports": reports(run, config, lowered, compiled, method or "exact"),
        "versions": _versions(),
    }


def count_bytes(run: Run, compiled: Any) -> dict[str, dict[str, float]]:
    """Count the bytes that each device sends over the workers' axis, and over other ones.

    Both count what is sent over several axes at once, as in a sum over `data` and `fsdp`.
    """
    mesh = jax.tree.leaves(compiled.input_shardings[0][0])[0].mesh
    sent = sent_by_axes(compiled.as_text(), mesh)
    return {
        "bytes_between_workers": {", ".join(k): v for k, v in sent.items() if run.axis in k},
        "bytes_of_others": {", ".join(k): v for k, v in sent.items() if k != (run.axis,)},
    }


def mean_loss(metrics: dict[str, float]) -> float:
    """Return the loss of one step, with DiLoCo the mean over the replicas."""
    islands = [value for name, value in metrics.items() if "loss_island" in name]
    return float(np.mean(islands)) if islands else metrics["learning/loss"]


def _interpret_flash_attention() -> None:
    """Attend by the kernel that MaxText has for TPUs alone, in Pallas' interpreter."""
    from maxtext.layers import attention_op

    kernels = attention_op.splash_attention_kernel
    kernels.make_splash_mha = functools.partial(kernels.make_splash_mha, interpret=True)

    def flash(
        self: Any, query: Any, key: Any, value: Any, *, decoder_segment_ids: Any, **others: Any
    ) -> tuple[Any, None, None]:
        out, _ = self.tpu_flash_attention(query, key, value, decoder_segment_ids)
        return out, None, None

    attention_op.AttentionOp.apply_attention = flash


def _record_programs() -> list[tuple[Any, Any, float]]:
    """Return a list that gets all programs that are compiled ahead of their call from now on."""
    programs: list[tuple[Any, Any, float]] = []
    compile_lowered = jax.stages.Lowered.compile

    def recorded(lowered: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        compiled = compile_lowered(lowered, *args, **kwargs)
        programs.append((lowered, compiled, time.perf_counter() - start))
        return compiled

    jax.stages.Lowered.compile = recorded  # type: ignore[method-assign, assignment]
    return programs


def reports(run: Run, config: Any, lowered: Any, compiled: Any, method: str) -> dict[str, Any]:
    """Count the bytes of the gradients by `dq.wire_report`, and of an all-reduce in BF16.

    MaxText sums gradients once for each micro-batch, and DiLoCo once for each fragment.
    """
    from flax import nnx
    from maxtext.trainers.diloco import utils as diloco

    state, shardings = lowered.args_info[0][0], compiled.input_shardings[0][0]
    if run.axis == "diloco":
        state, shardings = state.params, shardings.params
    else:
        state, shardings = (
            nnx.filter_state(tree["model"], nnx.Param).to_pure_dict() for tree in (state, shardings)
        )
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        shardings,
    )
    parts = [placed]
    if config.enable_streaming_diloco:
        manipulator = diloco.FragmentedTreeManipulator.create(placed, config)
        parts = [manipulator.get_flat_fragment(placed, number) for number in range(FRAGMENTS)]
    wire_reports = [
        dq.wire_report(
            part,
            run.axis,
            mesh=jax.tree.leaves(shardings)[0].mesh,
            method=method,
            specs=jax.tree.map(lambda leaf: leaf.sharding, part),
        )
        for part in parts
    ]
    wire_reports *= config.gradient_accumulation_steps
    return {
        "bytes": sum(report.bytes_per_worker for report in wire_reports),
        "exact_bytes": sum(report.exact_bytes for report in wire_reports),
        "bf16_bytes": sum(report.bytes_per_worker * report.ratio_bf16 for report in wire_reports),
        "coordinates": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(placed)),
    }


def compare(row: dict[str, Any]) -> dict[str, Any]:
    """Compare the two runs of a row, by all that workers send."""
    exact, compressed = (row[kind] for kind in ("exact", "compressed"))
    total = {
        kind: sum(row[kind]["bytes_between_workers"].values()) for kind in ("exact", "compressed")
    }
    others = {kind: sum(row[kind]["bytes_of_others"].values()) for kind in ("exact", "compressed")}
    return {
        "loss_difference": compressed["losses"][-1] - exact["losses"][-1],
        "ratio_of_others": others["compressed"] / others["exact"],
        "ratio_measured": total["exact"] / total["compressed"],
        "ratio_bf16": exact["wire_reports"]["bf16_bytes"] / total["compressed"],
    }


def code_lines(source: str) -> dict[str, int]:
    """Count the lines of a module that are code: of its functions, and of the rest."""
    tree = ast.parse(source)
    texts = set()  # lines of docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            assert node.end_lineno is not None
            texts |= set(range(node.lineno, node.end_lineno + 1))
    spaces = {tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT}
    lines = {
        token.start[0]
        for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
        if token.type not in spaces | {tokenize.ENDMARKER}
    } - texts
    counts = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            counts[node.name] = len(lines & set(range(node.lineno, node.end_lineno + 1)))
    return counts | {"imports": len(lines) - sum(counts.values())}


def _versions() -> dict[str, str]:
    """Return the versions of what trains, besides those of every result."""
    return {name: metadata.version(name) for name in ("maxtext", "flax", "optax", "drjax")}


def as_table(results: list[dict[str, Any]]) -> Table:
    """Make a table with one line for each way to train."""
    kinds = ("exact", "compressed")
    losses = [
        Column(heading, (kind, "losses", -1), "{:.4f}")
        for heading, kind in zip(("loss", "here"), kinds, strict=True)
    ]
    sizes = [
        Column(
            heading,
            lambda row, kind=kind: sum(row[kind]["bytes_between_workers"].values()),
            "{:,.0f}",
        )
        for heading, kind in zip(("bytes", "here"), kinds, strict=True)
    ]
    columns = (
        Column("run", "title"),
        *losses,
        *sizes,
        Column("of exact", "ratio_measured", "1/{:.2f}"),
        Column("of BF16", "ratio_bf16", "1/{:.2f}"),
        Column("other axes", "ratio_of_others", "{:.3f}"),
    )
    return table("MaxText, exact and through the library (here)", columns, results)


if __name__ == "__main__":
    main()
