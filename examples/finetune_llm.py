"""Fine-tune a checkpoint of the Llama or Gemma family with compressed gradients.

    python -m examples.finetune_llm  # offline, about 5 minutes on 2 CPU cores
    python -m examples.finetune_llm --checkpoint Llama-3.2-1B-Instruct --data chats.jsonl

A checkpoint is a folder in Hugging Face's layout with config.json, tokenizer.json and
*.safetensors. The result is written in the same layout to OUTPUT_DIR/model. Without a checkpoint, a
small decoder is pre-trained on the source code of the standard library. It is fine-tuned twice,
with the exact and with the compressed mean gradient, from the same weights and on the same batches.

An interrupted run resumes with the same command, bit-identically, from its last checkpoint. On
several hosts, start it on each with --coordinator, --num-processes and --process-id; OUTPUT_DIR has
to be on a file system that all of them share.

llm/training.py has the step, llm/reduction.py the compressed mean, llm/finetuning.py the loop.
"""

import dataclasses
import time
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.filesize import decimal

from examples.llm import checkpoint, demo, links, report
from examples.llm.averaging import PSUM, Averaging
from examples.llm.config import DecoderConfig
from examples.llm.documents import hold_out, read_documents
from examples.llm.encoding import TOKENIZER, read_encoder
from examples.llm.errors import RunError
from examples.llm.export import write_model, written_dtype
from examples.llm.finetuning import Every, Task, finetune
from examples.llm.mesh import fsdp_specs, join_processes, make_mesh, on_mesh
from examples.llm.metrics import Record
from examples.llm.model import Decoder
from examples.llm.options import Options
from examples.llm.packing import Rows, pack
from examples.llm.progress import progress
from examples.llm.reduction import wire_report
from examples.llm.snapshots import forget
from examples.llm.training import Recipe

EXACT = "exact"  # folder of the exact run inside the output folder
MODEL = "model"  # folder of the result


def main(options: Options) -> None:
    """Read the task, train, write the model and report."""
    start = time.perf_counter()
    try:  # Wrong options show here, before minutes of training.
        averaging = Averaging(method=options.method, topology=options.topology)
        if options.coordinator is not None:
            join_processes(options.coordinator, options.num_processes, options.process_id)
        mesh = make_mesh(
            options.workers,
            options.fsdp,
            options.num_processes or 1,
            # With one worker, a demonstration would have nothing to show.
            at_least=2 if options.is_demo and not averaging.is_exact else 1,
        )
        first = jax.process_index() == 0
        console = Console(quiet=not first)
        if mesh.shape["data"] == 1 and not averaging.is_exact:
            raise ValueError(
                "--workers is 1, so that nothing travels. Give more, or --method psum."
            )
        if options.restart:
            forget(options.output_dir)
            forget(options.output_dir / EXACT)
        if options.is_demo:
            options = with_demo(options, console)
        config, task = read_task(options, mesh)
        sent = wire_report(averaging, task.shapes, mesh)
    except (ValueError, FileNotFoundError) as problem:
        stop(problem)
    count = sum(leaf.size for leaf in jax.tree.leaves(task.shapes))
    console.print(
        f"{count:,} parameters, {len(task.rows.tokens):,} rows, {mesh.shape['data']} worker(s) of "
        f"{mesh.shape['fsdp']} device(s) of kind {mesh.devices.flat[0].device_kind}, each of which "
        f"sends {decimal(sent.bytes_per_worker)} a step",
        soft_wrap=True,
        highlight=False,
    )
    runs = []
    if options.compares and not averaging.is_exact:
        exact = Averaging(method=PSUM)
        runs.append(train(options, task, exact, options.output_dir / EXACT, console)[1])
    params, run = train(options, task, averaging, options.output_dir, console)
    runs.append(run)
    model = options.output_dir / MODEL
    write_model(model, config, params, options.checkpoint)
    if first:
        console.print(report.table(runs))
        if len(runs) == 2:
            sharing = mesh.shape["data"] // jax.process_count() if on_cpu(mesh) else 1
            predicted = links.Prediction.of(*runs, sharing=max(sharing, 1))
            console.print(links.table(predicted, runs[1].name))
        for path in (*write_report(runs, options), model):
            console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def stop(problem: Exception) -> NoReturn:
    """End the command with the message of an error, without a traceback."""
    raise SystemExit(f"finetune_llm: {problem}") from None


def with_demo(options: Options, console: Console) -> Options:
    """Make a checkpoint and data, and return the options of the demonstration."""
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
    """Read everything but the weights, which are read when a run starts."""
    if options.checkpoint.resolve() == (options.output_dir / MODEL).resolve():
        raise ValueError(
            f"--checkpoint is {options.checkpoint}, which --output-dir {options.output_dir} would "
            "overwrite. Give another --output-dir."
        )
    if not (options.checkpoint / TOKENIZER).is_file():
        raise ValueError(
            f"--checkpoint is {options.checkpoint}, which has no {TOKENIZER}. Give a folder that "
            "has one."
        )
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
    written_dtype(config)  # It is refused now rather than after training.
    dtype = jnp.dtype(options.dtype or ("float32" if on_cpu(mesh) else "bfloat16"))

    def make() -> Decoder:
        return Decoder(config, dtype=dtype, remat=options.remat, rngs=nnx.Rngs(0))

    structure, shapes = nnx.split(nnx.eval_shape(make), nnx.Param)
    shardings = on_mesh(fsdp_specs(shapes, mesh), mesh)

    def load() -> nnx.State:
        try:
            _, params = checkpoint.load(options.checkpoint, dtype=jnp.float32, shardings=shardings)
        except (ValueError, FileNotFoundError) as problem:
            raise RunError(f"--checkpoint: {problem}") from None
        return params

    task = Task(
        structure=structure,
        shapes=shapes,
        load=load,
        rows=rows,
        held_out=held_out_rows.evenly(options.evaluation_rows),
        mesh=mesh,
        model=f"{options.checkpoint.resolve().name} in {dtype}",
        batch=options.batch,
        micro_batches=options.accumulate,
    )
    return config, task


def on_cpu(mesh: Mesh) -> bool:
    """Return whether the devices of a mesh are processors of hosts."""
    return mesh.devices.flat[0].platform == "cpu"


def check_fits(options: Options, config: DecoderConfig, *rows: Rows) -> None:
    """Raise ValueError for rows that the model cannot read."""
    context, longest = rows[0].tokens.shape[1], config.max_positions
    if context > longest:
        raise ValueError(
            f"--context is {context}, but the model was made for at most {longest}. Give less."
        )
    largest = max(int(ids.max()) for part in rows for ids in (part.tokens, part.targets))
    if largest >= config.vocabulary:
        raise ValueError(
            f"--checkpoint is {options.checkpoint}: its {TOKENIZER} gives token {largest}, but its "
            f"config.json has a vocabulary of {config.vocabulary}. Give files that belong together."
        )


def train(
    options: Options, task: Task, averaging: Averaging, folder: Path, console: Console
) -> tuple[nnx.State, report.Run]:
    """Train once, with progress on the console."""
    recipe = Recipe(
        averaging=averaging,
        steps=options.steps,
        learning_rate=options.learning_rate or 2e-5,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
    )
    every = Every(
        evaluate=options.evaluate_every, save=options.save_every, vnmse=options.sample_vnmse
    )
    seen: Record = {}

    with progress(console, f"fine-tuning, {averaging.name}", options.steps) as show_step:

        def on_step(record: Record) -> None:
            seen.update(record)  # Values that are not measured in each step stay in sight.
            parts = [
                f"loss {seen['loss']:.3f}",
                f"held-out {seen['evaluation_loss']:.3f}" if "evaluation_loss" in seen else "",
                f"{seen['tokens_per_second']:,.0f} tokens/s",
                f"{decimal(seen['bytes_sent'])} sent",
                f"vNMSE {seen['vnmse']:.1e}" if "vnmse" in seen else "",
            ]
            show_step(record["step"] - 1, ", ".join(filter(None, parts)))

        try:
            params, records = finetune(task, recipe, every, folder, on_step)
        except RunError as problem:
            stop(problem)
    wire = wire_report(averaging, task.shapes, task.mesh)
    return params, report.Run(name=averaging.name, records=records, wire=wire)


def write_report(runs: list[report.Run], options: Options) -> list[Path]:
    """Write a plot and a JSON file, and return the paths of all files about the runs."""
    folder = options.output_dir
    report.save_plot(runs, folder / "curves.png")
    report.save_json(runs, dataclasses.asdict(options), folder / "results.json")
    return [folder / name for name in ("curves.png", "results.json", "metrics.jsonl")]


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.finetune_llm"))
