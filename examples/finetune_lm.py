"""Fine-tunes a small language model twice: with the exact and with a compressed mean gradient.

    python examples/finetune_lm.py

Everything runs offline within minutes, on eight virtual CPU devices or on the GPUs that are
there. A transformer is pre-trained on the source code of the Python standard library, then
fine-tuned on the Python language reference by data-parallel workers. Both fine-tuning runs start
from the same weights and see the same batches; only the mean over the workers differs.

The training step is in small_lm/training.py, the loop around it in small_lm/comparison.py.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import tyro
from jax.sharding import AxisType, Mesh
from rich.console import Console
from small_lm import report
from small_lm.comparison import finetune_twice
from small_lm.data import all_windows, load_corpora
from small_lm.gradients import gradient_snapshots, save_snapshots
from small_lm.model import ModelConfig
from small_lm.progress import progress
from small_lm.training import (
    Method,
    Params,
    new_model,
    pretrain,
)

import dynamiq_jax as dq


@dataclass(frozen=True)
class Options:
    """Fine-tune a small language model with the exact and with a compressed mean gradient."""

    method: Literal["dynamiq", "dynamiq-paper", "exact"] = "dynamiq"
    """How to compress gradients: this library's variant of DynamiQ, the algorithm as its paper
    states it, or not at all, to see that two equal runs stay equal."""

    bits: float = 5.0
    """Bits per coordinate to spend on the wire. Float32 gradients take 32."""

    topology: str = "ring"
    """Path of the gradients between workers; a wrong name lists the possible ones."""

    workers: int = 8
    """Data-parallel workers. With several GPUs, at most as many as there are of them;
    otherwise virtual CPU devices."""

    pretrain_steps: int = 240
    """Steps of pre-training on source code, before the comparison starts."""

    steps: int = 160
    """Steps of fine-tuning on the language reference, in each of the two runs."""

    batch: int = 2
    """Sequences per worker and step."""

    context: int = 128
    """Tokens per sequence."""

    width: int = 256
    """Features per token in the transformer."""

    layers: int = 2
    """Blocks of the transformer."""

    heads: int = 4
    """Attention heads per block. They divide the width into even parts."""

    pretrain_learning_rate: float = 6e-3
    """Peak learning rate of pre-training."""

    learning_rate: float = 2e-3
    """Peak learning rate of fine-tuning."""

    seed: int = 0
    """Chooses initial weights, batches and the randomness of compression."""

    output_dir: Path = Path("results/finetune_lm")
    """Where the plot and the JSON file go."""

    dump_gradients: Path | None = None
    """Also fine-tune on one device and write the gradients of every worker early, halfway and at
    the end to this .npz file."""

    def __post_init__(self) -> None:
        for name in ("pretrain_steps", "steps", "batch", "context", "width", "layers", "heads"):
            self._require(name, getattr(self, name) >= 1, "give at least 1")
        for name in ("pretrain_learning_rate", "learning_rate"):
            self._require(name, getattr(self, name) > 0, "give a positive number")
        self._require("workers", self.workers >= 2, "give at least 2, or there is no mean to take")
        self._require("seed", self.seed >= 0, "give 0 or more")
        even = self.width % (2 * self.heads) == 0
        self._require("width", even, f"give a multiple of {2 * self.heads}, twice --heads")
        _ = self.compression  # The method checks --bits itself.

    def _require(self, name: str, fine: bool, remedy: str) -> None:
        if not fine:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(self, name)}: {remedy}.")

    @property
    def compression(self) -> Method:
        """The method that the options name."""
        match self.method:
            case "dynamiq":
                return dq.DynamiQ(bits=self.bits)
            case "dynamiq-paper":
                return dq.DynamiQ.paper(bits=self.bits)
            case "exact":
                return dq.Exact()


def main(options: Options) -> None:
    """Pre-trains, fine-tunes twice, reports."""
    console = Console()
    start = time.perf_counter()
    try:  # What is wrong with the options shows here, before minutes of training.
        mesh = worker_mesh(options.workers)
        corpora = load_corpora()
        held_out = all_windows(corpora.held_out, context=options.context, multiple_of=mesh.size)
        config = ModelConfig(corpora.vocabulary, options.width, options.layers, options.heads)
        structure, params = new_model(config, options.seed)
        exact_wire = wire(params, mesh, dq.Exact(), options.topology)
        compressed_wire = wire(params, mesh, options.compression, options.topology)
    except (ValueError, FileNotFoundError) as problem:
        raise SystemExit(f"finetune_lm.py: {problem}") from None
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    device = mesh.devices[0].device_kind
    console.print(f"{count:,} parameters, {mesh.size} workers on devices of kind {device}")

    with progress(console, "pre-training", options.pretrain_steps) as show:
        params = pretrain(
            structure,
            params,
            corpora.source_code,
            steps=options.pretrain_steps,
            batch=mesh.size * options.batch,
            context=options.context,
            learning_rate=options.pretrain_learning_rate,
            seed=options.seed,
            on_step=lambda step, loss: show(step, f"loss {loss:.3f}"),
        )
    with progress(console, "fine-tuning twice", options.steps) as show:
        exact, compressed, vnmse = finetune_twice(
            structure,
            params,
            corpora.reference,
            held_out,
            mesh,
            method=options.compression,
            topology=options.topology,
            steps=options.steps,
            batch=options.batch,
            learning_rate=options.learning_rate,
            seed=options.seed,
            on_step=lambda step, exact, compressed: show(
                step, f"loss {exact:.3f} exact, {compressed:.3f} compressed"
            ),
        )
    comparison = report.Comparison(
        options.method, exact, compressed, exact_wire, compressed_wire, vnmse
    )
    console.print(report.table(comparison))

    options.output_dir.mkdir(parents=True, exist_ok=True)
    report.save_plot(comparison, options.output_dir / "curves.png")
    report.save_json(comparison, dataclasses.asdict(options), options.output_dir / "results.json")
    written = [options.output_dir / "curves.png", options.output_dir / "results.json"]
    if options.dump_gradients:
        last = options.steps - 1
        snapshots = gradient_snapshots(
            structure,
            params,
            corpora.reference,
            workers=mesh.size,
            steps=sorted({last // 10, last // 2, last}),
            batch=options.batch,
            context=options.context,
            learning_rate=options.learning_rate,
            seed=options.seed,
        )
        save_snapshots(options.dump_gradients, snapshots)
        written.append(options.dump_gradients)
    for path in written:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def worker_mesh(workers: int) -> Mesh:
    """A mesh of one axis, "data", over GPUs if there are several, else virtual CPU devices."""
    jax.config.update("jax_num_cpu_devices", workers)
    devices = jax.devices()
    if devices[0].platform == "cpu" or len(devices) == 1:
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    devices = devices[:workers]
    return jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def wire(params: Params, mesh: Mesh, method: Method, topology: str) -> report.Wire:
    """What one mean of the gradients sends, which depends on nothing but their shapes."""
    sent = dq.wire_report(params, mesh.size, method=method, topology=topology)
    return report.Wire(sent.bytes_per_worker, sent.bits, sent.ratio_f32, sent.ratio_bf16)


if __name__ == "__main__":
    main(tyro.cli(Options))
