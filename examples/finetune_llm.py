"""Fine-tune a checkpoint of the Llama family with compressed gradients.

    python -m examples.finetune_llm  # offline, about 5 minutes on 2 CPU cores
    python -m examples.finetune_llm --checkpoint Llama-3.2-1B-Instruct --data chats.jsonl

llm/train_step.py has a train step as JAX's guides write one, and `make_trainer` of llm/routes.py
the line that compresses it: `step = dq.compress(step, "data")`. The same command is for CPUs with
virtual devices, several hosts, GPUs and TPUs.

A checkpoint is a folder in Hugging Face's layout with config.json, tokenizer.json and
*.safetensors. The result is written in the same layout to OUTPUT_DIR/model. Without a checkpoint, a
new small decoder is trained on the source code of the standard library. It is trained twice, with
the exact and with the compressed mean gradient, from the same weights and on the same batches. The
last lines are a table for a report, with predicted times of a step on slower links.

An interrupted run resumes with the same command, bit-identically, from its last checkpoint. On
several hosts, start it on each with --processes; OUTPUT_DIR has to be on a file system that all
of them share.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AxisType, Mesh
from rich.console import Console

import dynamiq_jax as dq
from examples.llm import checkpoint, report
from examples.llm.data import Encoder, hold_out, pack, read_documents
from examples.llm.model import abstract_decoder
from examples.llm.options import Options
from examples.llm.plot import plot_losses
from examples.llm.progress import train_shown
from examples.llm.recipe import Recipe
from examples.llm.run import Record, Task, check_runs
from examples.llm.sharding import fsdp_specs, on_mesh
from examples.tools import budget, small_decoder

REPORT, PLOT = "report.md", "losses.png"
VIRTUAL_DEVICES = 8  # on CPUs, unless --workers is given


def main(options: Options) -> None:
    """Train, write the model and report. A mistake of the user ends it with one line."""
    try:
        finetune(options)
    except (ValueError, OSError) as problem:
        raise SystemExit(f"finetune_llm: {problem}") from None


def finetune(options: Options) -> None:
    """Read the task, train, write the model and report."""
    dq.keep_memory()  # On CPUs, steps find the memory of the step before.
    if options.processes is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # A process that hangs misses heartbeats, and JAX ends the others.
        jax.distributed.initialize(*options.processes, heartbeat_timeout_seconds=30)
    mesh = make_mesh(options)
    if mesh.shape["data"] == 1 and not options.is_exact:
        raise ValueError("--workers is 1, so that nothing travels. Give more, or --method exact.")
    console, folder = Console(quiet=jax.process_index() > 0, emoji=False), options.output_dir
    if options.checkpoint is None:
        options = with_demo(options)
    config, task = read_task(options, mesh)
    recipe = Recipe(
        method=options.method,
        topology=options.topology,
        route=options.route,
        steps=options.steps,
        learning_rate=options.learning_rate or 2e-5,
        seed=options.seed,
    )
    recipes = {folder: recipe}
    if options.compare and not recipe.is_exact:
        exact = dataclasses.replace(recipe, method="exact", route=None)
        recipes = {folder / "exact": exact} | recipes
    console.print(check_runs(task, recipes, options.save_every), soft_wrap=True)
    runs: dict[str, list[Record]] = {}
    for path, recipe in recipes.items():
        params = None  # Those of two runs may not fit.
        budget.give_back_memory()
        params, runs[recipe.name] = train_shown(console, task, recipe, path, options.save_every)
    checkpoint.save(folder / "model", config, params, options.checkpoint)
    if jax.process_index() == 0:
        text = report.text(task, {recipe.name: recipe for recipe in recipes.values()}, runs)
        (folder / REPORT).write_text(f"{text}\n")
        print(f"\n{text}\n")
        try:
            plot_losses(folder / PLOT, runs)
        except ImportError:
            print("Without matplotlib, there is no plot of the losses: pip install matplotlib.")
        console.print(f"wrote {folder}: metrics.jsonl, model, and the report", soft_wrap=True)


def make_mesh(options: Options) -> Mesh:
    """Make a mesh of the accelerators if there are enough, otherwise of virtual CPU devices."""
    fsdp, processes = options.fsdp, options.processes[1] if options.processes else 1
    virtual = options.workers * fsdp if options.workers else max(VIRTUAL_DEVICES, fsdp)
    jax.config.update("jax_num_cpu_devices", max(virtual // processes, 1))
    devices = jax.devices()
    wanted = (options.workers or (1 if options.is_exact else 2)) * fsdp
    if len(devices) == 1 < wanted:
        print(
            f"One {devices[0].device_kind} is not enough for {wanted} workers. They train on "
            "virtual CPU devices; --method exact trains on that one device."
        )
        devices = jax.devices("cpu")
        jax.config.update("jax_default_device", devices[0])
    workers = options.workers or len(devices) // fsdp
    size = workers * fsdp
    # A process without a device would wait for the others forever.
    if size > len(devices) or size == 0 or (processes > 1 and size < len(devices)):
        raise ValueError(
            f"--workers is {workers} and --fsdp is {fsdp}. Their product has to be {len(devices)}, "
            "the number of devices, or less with one process. Give other numbers."
        )
    axes = (AxisType.Auto,) * 2
    return jax.make_mesh((workers, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices[:size])


def with_demo(options: Options) -> Options:
    """Make a model and data, and return the options of the demonstration."""
    folder = options.output_dir / "small_model"
    small_decoder.prepare(folder)
    return dataclasses.replace(
        options,
        checkpoint=folder,
        data=folder / small_decoder.DATA,
        compare=True,
        context=options.context or 128,
        learning_rate=options.learning_rate or 6e-3,
    )


def read_task(options: Options, mesh: Mesh) -> tuple[Any, Task]:
    """Read everything but the weights, which are read when a run starts."""
    folder, context = options.checkpoint, options.context or 1024
    assert folder is not None and options.data is not None
    if folder.resolve() == (options.output_dir / "model").resolve():
        raise ValueError(
            f"--checkpoint is {folder}, which --output-dir {options.output_dir} would overwrite. "
            "Give another --output-dir."
        )
    config, encoder = checkpoint.read_config(folder), Encoder(folder)
    if context > config.max_position_embeddings:
        raise ValueError(
            f"--context is {context}, but the model was made for at most "
            f"{config.max_position_embeddings}. Give less."
        )
    name = f"--data {options.data}"
    documents, held_out = hold_out(read_documents(options.data, "--data"), name)
    rows = pack(encoder.encode(documents, f"{name}, document"), context)
    first = len(documents) + 1
    held_out_rows = pack(encoder.encode(held_out, f"{name}, document", first), context)
    largest = max(int(ids.max()) for r in (rows, held_out_rows) for ids in (r.tokens, r.targets))
    if largest >= config.vocab_size:
        raise ValueError(
            f"--checkpoint is {folder}: its tokenizer gives token {largest}, but its config.json "
            f"has a vocabulary of {config.vocab_size}. Give files that belong together."
        )
    # CPUs are slow with other dtypes, and accelerators have less memory.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    dtype = jnp.dtype("float32" if on_cpu else "bfloat16")
    structure, shapes = abstract_decoder(config, dtype=dtype, remat=not on_cpu)
    shardings = on_mesh(fsdp_specs(shapes, mesh), mesh)
    task = Task(
        structure=structure,
        shapes=shapes,
        load=lambda: checkpoint.load(folder, config, shardings),
        rows=rows,
        held_out=held_out_rows,
        mesh=mesh,
        model=f"{folder.resolve().name} in {dtype}",
        files=[folder / checkpoint.CONFIG, *checkpoint.weight_files(folder)],
        batch=options.batch,
    )
    return config, task


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.finetune_llm"))
