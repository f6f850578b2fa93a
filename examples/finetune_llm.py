"""Fine-tunes a checkpoint of the Llama or Gemma family with compressed gradients.

    python examples/finetune_llm.py  # offline, minutes on CPUs
    python examples/finetune_llm.py --checkpoint Llama-3.2-1B-Instruct --data chats.jsonl

A checkpoint is a folder of Hugging Face's layout with config.json, tokenizer.json and
*.safetensors; the result is written in the same layout to OUTPUT_DIR/model. Without one, a small
decoder is pre-trained on the source code of the standard library and fine-tuned twice, with the
exact and with a compressed mean gradient, from the same weights and on the same batches.

Interrupted? The same command goes on from its last checkpoint, bit for bit as if nothing had
happened. On several hosts, start it on each with --coordinator, --num-processes and --process-id;
OUTPUT_DIR has to be on a file system that all of them see.

The step is in llm/training.py, the compressed mean in llm/reduction.py, the loop in
llm/finetuning.py.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from dynamiq_jax._workshop import joining
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.settings import PSUM, Setting, parse_setting
from dynamiq_jax._workshop.units import format_bytes
from examples.llm import checkpoint, demo, report
from examples.llm.config import DecoderConfig
from examples.llm.documents import hold_out, read_documents
from examples.llm.encoding import TOKENIZER, read_encoder
from examples.llm.export import write_model, written_dtype
from examples.llm.finetuning import Every, Task, finetune
from examples.llm.mesh import fsdp_specs, make_mesh, on_mesh
from examples.llm.metrics import Record
from examples.llm.model import Decoder
from examples.llm.packing import Rows, pack
from examples.llm.progress import progress
from examples.llm.reduction import wire_report
from examples.llm.snapshots import forget
from examples.llm.training import Recipe

EXACT = "exact"  # Folder of the run to compare with.
MODEL = "model"  # Folder of what comes out.


@dataclass(frozen=True)
class Options:
    """Fine-tune a language model with compressed gradients. Without arguments, a small one that is
    made on the spot, exact against compressed. The same command goes on where it was interrupted.
    """

    checkpoint: Path | None = None
    """Folder of the model: config.json, tokenizer.json, *.safetensors, of the Llama or Gemma 3
    family; for chats also chat_template.jinja, or chat_template in tokenizer_config.json. None
    pre-trains a small one first."""

    data: Path | None = None
    """Text to train on: a .txt file, or .jsonl with one document a line, {"text": ...} or
    {"messages": [{"role": ..., "content": ...}]}. Chats are written with the checkpoint's chat
    template; only the assistant's turns are learned."""

    evaluation_data: Path | None = None
    """Text to evaluate on. None holds out the last part of --data."""

    evaluation_share: float = 0.05
    """How much of --data to hold out, unless --evaluation-data is given."""

    evaluation_rows: int = 256
    """Most rows to evaluate on; of more, as many are taken evenly."""

    method: str = "dynamiq:5"
    """How gradients are averaged: psum for the exact mean, or METHOD[:BITS][:TOPOLOGY], such as
    dynamiq:4:butterfly, mxfp8, bf16 or ef+topk_chunked:2 (ef+ adds error feedback). A wrong one
    lists what there is; `dynamiq-jax advise` says what pays."""

    compare: bool | None = None
    """Also fine-tune with the exact mean, for a table and plots of both. None compares in the
    demonstration only."""

    workers: int | None = None
    """Data-parallel workers. Between these, gradients travel compressed. None for one on every
    device (eight virtual ones on CPUs), divided by --fsdp."""

    fsdp: int = 1
    """Devices over which each worker spreads its parameters, optimizer state and rows, for models
    that do not fit one. Traffic between them is exact: choose those with fast links."""

    steps: int = 160
    """Updates."""

    batch: int = 2
    """Rows per worker and micro-batch; a multiple of --fsdp."""

    accumulate: int = 1
    """Micro-batches whose gradients are added up before one update. Takes more time instead of
    more memory, and gradients travel once for all of them."""

    context: int | None = None
    """Tokens per row. Short documents share one, without seeing each other; long ones are cut.
    None is 128 in the demonstration and 1024 otherwise."""

    learning_rate: float | None = None
    """Peak of the learning rate, which rises over a tenth of the steps and falls as a cosine. None
    is 2e-3 in the demonstration and 2e-5 otherwise."""

    weight_decay: float = 0.01
    """Of AdamW, on matrices and embeddings."""

    clip: float = 1.0
    """Largest norm of the mean gradient; longer ones are shortened to it."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """What the model computes in; weights and optimizer state are float32 anyway. None is bfloat16
    on accelerators and float32 on CPUs, which are slow at anything else."""

    remat: bool = False
    """Compute activations of a block again in the backward pass instead of keeping them: less
    memory for a third more work."""

    seed: int = 0
    """Chooses the order of rows and the rounding of gradients."""

    evaluate_every: int = 20
    """Steps between evaluations on the held-out text."""

    save_every: int = 50
    """Steps between checkpoints; what a crash costs at most."""

    sample_vnmse: int = 20
    """Steps between measurements of the mean gradient's error, each of which takes an exact mean
    beside the compressed one."""

    pretrain_steps: int = 240
    """Steps of pre-training in the demonstration."""

    output_dir: Path = Path("results/finetune_llm")
    """Where checkpoints, metrics.jsonl, plots and the fine-tuned model go."""

    restart: bool = False
    """Delete the checkpoints and metrics of an earlier run in --output-dir, instead of going on
    with it."""

    coordinator: str | None = None
    """HOST:PORT of the first of several processes."""

    num_processes: int | None = None
    """How many processes there are."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    def __post_init__(self) -> None:
        at_least_one = ("fsdp", "steps", "batch", "accumulate", "pretrain_steps", "evaluation_rows")
        every = ("evaluate_every", "save_every", "sample_vnmse")
        for name in (*at_least_one, *every):
            self._require(name, getattr(self, name) >= 1, "give at least 1")
        for name in ("workers", "context", "num_processes"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "give at least 1")
        rate = self.learning_rate
        self._require("learning_rate", rate is None or rate > 0, "give a positive number")
        self._require("clip", self.clip > 0, "give a positive number")
        self._require("weight_decay", self.weight_decay >= 0, "give 0 or more")
        self._require("seed", self.seed >= 0, "give 0 or more")
        share = self.evaluation_share
        self._require("evaluation_share", 0 < share < 1, "give a part between 0 and 1")
        even = self.batch % self.fsdp == 0
        self._require("batch", even, f"give a multiple of --fsdp, which is {self.fsdp}")
        both = (self.checkpoint is None) == (self.data is None)
        self._require("data", both, "give --checkpoint and --data, or neither")
        several = [self.coordinator, self.num_processes, self.process_id]
        together = several.count(None) in (0, 3)
        remedy = "give --coordinator, --num-processes and --process-id, or none of them"
        self._require("coordinator", together, remedy)
        alone = self.checkpoint is not None or self.coordinator is None
        self._require("coordinator", alone, "the demonstration is for one process")

    def _require(self, name: str, fine: bool, remedy: str) -> None:
        if not fine:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is {getattr(self, name)}: {remedy}.")

    @property
    def is_demo(self) -> bool:
        """Whether to make a model and data."""
        return self.checkpoint is None

    @property
    def compares(self) -> bool:
        """Whether to fine-tune with the exact mean too."""
        return self.is_demo if self.compare is None else self.compare


def main(options: Options) -> None:
    """Reads, fine-tunes, writes, reports."""
    start = time.perf_counter()
    try:  # What is wrong with the options shows here, before minutes of training.
        setting = parse_setting(options.method, "--method")
        if options.coordinator is not None:
            joining.join(options.coordinator, options.num_processes, options.process_id)
        mesh = make_mesh(
            options.workers,
            options.fsdp,
            options.num_processes or 1,
            # A demonstration of what travels needs two workers at least.
            at_least=2 if options.is_demo and setting.method is not None else 1,
        )
        first = jax.process_index() == 0
        console = Console(quiet=not first)
        if mesh.shape["data"] == 1 and setting.method is not None:
            raise ValueError("--workers is 1: nothing travels. Give more, or --method psum.")
        if options.restart:
            forget(options.output_dir)
            forget(options.output_dir / EXACT)
        if options.is_demo:
            options = with_demo(options, console)
        config, task = read_task(options, mesh)
        sent = wire_report(setting, task.shapes, mesh)
    except (CommandError, ValueError, FileNotFoundError) as problem:
        raise SystemExit(f"finetune_llm.py: {problem}") from None
    count = sum(leaf.size for leaf in jax.tree.leaves(task.shapes))
    console.print(
        f"{count:,} parameters, {len(task.rows.tokens):,} rows, {mesh.shape['data']} worker(s) of "
        f"{mesh.shape['fsdp']} device(s) of kind {mesh.devices.flat[0].device_kind}, each of which "
        f"sends {format_bytes(sent.bytes_per_worker)} a step",
        soft_wrap=True,
        highlight=False,
    )
    runs = []
    if options.compares and setting.method is not None:  # Else it is the exact run itself.
        folder = options.output_dir / EXACT
        runs.append(train(options, task, parse_setting(PSUM), folder, console)[1])
    params, compressed = train(options, task, setting, options.output_dir, console)
    runs.append(compressed)
    model = options.output_dir / MODEL
    write_model(model, config, params, options.checkpoint)
    if first:
        console.print(report.table(runs))
        for path in (*write_report(runs, options), model):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def with_demo(options: Options, console: Console) -> Options:
    """Options with a checkpoint and data that were just made, and what suits them."""
    with progress(console, "pre-training", options.pretrain_steps) as on_step:
        made = demo.prepare(options.output_dir, steps=options.pretrain_steps, on_step=on_step)
    return dataclasses.replace(
        options,
        checkpoint=made.checkpoint,
        data=made.data,
        evaluation_data=made.evaluation_data,
        compare=options.compares,
        context=options.context or 128,
        learning_rate=options.learning_rate or 2e-3,
    )


def read_task(options: Options, mesh: Mesh) -> tuple[DecoderConfig, Task]:
    """Everything to train on but the weights, which are read when a run begins."""
    if options.checkpoint.resolve() == (options.output_dir / MODEL).resolve():
        raise ValueError(
            f"--checkpoint is {options.checkpoint}, which --output-dir {options.output_dir} would "
            "overwrite. Give another --output-dir."
        )
    if not (options.checkpoint / TOKENIZER).is_file():
        raise ValueError(f"--checkpoint is {options.checkpoint}: it has no {TOKENIZER}.")
    encoder = read_encoder(options.checkpoint)
    documents = read_documents(options.data, "--data")
    if options.evaluation_data is not None:
        held_out = read_documents(options.evaluation_data, "--evaluation-data")
        held_out_name, first_held_out = f"--evaluation-data {options.evaluation_data}", 1
    else:
        documents, held_out = hold_out(documents, options.evaluation_share)
        held_out_name, first_held_out = f"--data {options.data}", len(documents) + 1
    context = options.context or 1024
    rows = pack(encoder.encode(documents, f"--data {options.data}, document"), context)
    held_out_rows = pack(
        encoder.encode(held_out, f"{held_out_name}, document", first_held_out), context
    )
    config = checkpoint.read_config(options.checkpoint)
    check_fits(options, config, rows, held_out_rows)
    written_dtype(config)  # Better refused now than after training.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.dtype(options.dtype or ("float32" if on_cpu else "bfloat16"))

    def make() -> Decoder:
        return Decoder(config, dtype=dtype, remat=options.remat, rngs=nnx.Rngs(0))

    structure, shapes = nnx.split(nnx.eval_shape(make), nnx.Param)
    shardings = on_mesh(fsdp_specs(shapes, mesh), mesh)

    def load() -> nnx.State:
        try:
            _, params = checkpoint.load(options.checkpoint, dtype=jnp.float32, shardings=shardings)
        except (ValueError, FileNotFoundError) as problem:
            raise CommandError(f"--checkpoint: {problem}") from None
        return params

    task = Task(
        structure,
        shapes,
        load,
        rows,
        held_out_rows.evenly(options.evaluation_rows),
        mesh,
        model=f"{options.checkpoint.resolve().name} in {dtype}",
        batch=options.batch,
        micro_batches=options.accumulate,
    )
    return config, task


def check_fits(options: Options, config: DecoderConfig, *rows: Rows) -> None:
    """Refuses rows that the model cannot read."""
    context, longest = rows[0].tokens.shape[1], config.max_positions
    if context > longest:
        raise ValueError(f"--context is {context}: the model was made for {longest} at most.")
    largest = max(int(ids.max()) for part in rows for ids in (part.tokens, part.targets))
    if largest >= config.vocabulary:
        raise ValueError(
            f"--checkpoint is {options.checkpoint}: its tokenizer.json gives token {largest}, but "
            f"its config.json has a vocabulary of {config.vocabulary}. They do not belong together."
        )


def train(
    options: Options, task: Task, setting: Setting, folder: Path, console: Console
) -> tuple[nnx.State, report.Run]:
    """One run, with its progress on the console."""
    recipe = Recipe(
        setting,
        options.steps,
        options.learning_rate or 2e-5,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
    )
    every = Every(options.evaluate_every, options.save_every, options.sample_vnmse)
    seen: Record = {}

    with progress(console, f"fine-tuning, {setting.name}", options.steps) as show_step:

        def on_step(record: Record) -> None:
            seen.update(record)  # What is not measured in every step stays in sight.
            parts = [
                f"loss {seen['loss']:.3f}",
                f"held-out {seen['evaluation_loss']:.3f}" if "evaluation_loss" in seen else "",
                f"{seen['tokens_per_second']:,.0f} tokens/s",
                f"{format_bytes(seen['bytes_sent'])} sent",
                f"vNMSE {seen['vnmse']:.1e}" if "vnmse" in seen else "",
            ]
            show_step(record["step"] - 1, ", ".join(filter(None, parts)))

        try:
            params, records = finetune(task, recipe, every, folder, on_step)
        except CommandError as problem:
            raise SystemExit(f"finetune_llm.py: {problem}") from None
    name = "exact (psum)" if setting.method is None else setting.name
    return params, report.Run(name, records, wire_report(setting, task.shapes, task.mesh))


def write_report(runs: list[report.Run], options: Options) -> list[Path]:
    """Writes a plot and a JSON file; returns where everything about the runs is."""
    folder = options.output_dir
    report.save_plot(runs, folder / "curves.png")
    report.save_json(runs, dataclasses.asdict(options), folder / "results.json")
    return [folder / name for name in ("curves.png", "results.json", "metrics.jsonl")]


if __name__ == "__main__":
    main(tyro.cli(Options))
