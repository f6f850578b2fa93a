"""Gradients that workers meet while fine-tuning a language model, written to a file.

    python -m benchmarks.error.dump_gradients --workers 16 --output gradients.npz
    dynamiq-jax compare --gradients gradients.npz --workers 8 16
    python -m benchmarks.error.dump_gradients --model smollm2 --kinds attention --layers 0 15 29

Training takes the exact mean; the file has one array STEP/PARAMETER of [workers, *shape] for each
step and parameter. SmolLM2 is not trained here: the file has an array PARAMETER of the model in the
folder that `--checkpoint` names, that of `make demo-llm` or a fine-tuned one. For your own model,
write such a file with np.savez, or as safetensors.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console

from benchmarks.harness.command import run
from benchmarks.real_lm.folder import check_folder
from benchmarks.real_lm.gradients import kind_of, layer_of, worker_gradients
from benchmarks.real_lm.texts import Text
from benchmarks.training.small_lm.corpora import load_corpora
from benchmarks.training.small_lm.gradients import gradient_snapshots, save_snapshots
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import pretrain
from benchmarks.training.small_lm.training import new_model
from examples.llm import checkpoint
from examples.tools.small_decoder import new_decoder, small_config

# Options of the models that are trained here, and of a real one.
TRAINED = ("steps", "pretrain_steps", "seed")
READ = ("checkpoint", "text", "kinds", "layers", "embedding_every", "batch", "context")


@dataclasses.dataclass(frozen=True)
class Config:
    """Write the gradients of several training steps, of every worker, to an .npz file."""

    output: Path = Path("gradients.npz")
    """File to write."""

    model: Literal["transformer", "decoder", "smollm2"] = "transformer"
    """What is trained: the small transformer of the benchmarks, the decoder of the Llama family
    that examples.finetune_llm makes, or a real language model in the folder of --checkpoint."""

    checkpoint: Path = Path("results/smollm2")
    """Of smollm2: folder of the model, whose gradients are taken without training it."""

    text: Text = "chats"
    """Of smollm2: conversations or plain text."""

    kinds: tuple[Literal["embedding", "attention", "mlp", "norm"], ...] = ("attention", "mlp")
    """Of smollm2: tensors to write. All of them take 0.5 GB for each worker."""

    layers: tuple[int, ...] = (0, 10, 20, 29)
    """Of smollm2: layers whose tensors are written."""

    embedding_every: int = 1
    """Of smollm2: the first of every so many rows of the embedding is written, so that a part of
    the layers and as large a part of the embedding are a small likeness of the model."""

    batch: int = 2
    """Of smollm2: rows of each worker."""

    context: int = 256
    """Of smollm2: tokens of a row."""

    workers: int = 16
    """Workers whose gradients are written; eight train, however many these are."""

    steps: tuple[int, ...] = (20, 100, 200)
    """Not of smollm2: training steps, from 0; training ends after the last."""

    pretrain_steps: int = 240
    """Not of smollm2: steps of pre-training on source code before."""

    seed: int = 0
    """Not of smollm2: chooses the first weights and the batches."""


def main(options: Config) -> None:
    """Write the gradients."""
    if not options.output.absolute().parent.is_dir():
        raise SystemExit(f"--output is {options.output}: no such folder. Make it.")
    if options.workers < 1 or not options.steps or min(options.steps) < 0:
        raise SystemExit("--workers and --steps: give at least one worker and one step from 0.")
    if options.embedding_every < 1:
        raise SystemExit(f"--embedding-every is {options.embedding_every}. Give at least 1.")
    for name in TRAINED if options.model == "smollm2" else READ:
        if getattr(options, name) != getattr(Config(), name):
            option = "--" + name.replace("_", "-")
            raise SystemExit(f"{option} has no effect with --model {options.model}. Leave it out.")
    console, start = Console(), time.perf_counter()
    if options.model == "smollm2":
        try:
            with console.status("Gradients"):
                dump_real(options)
        except (ValueError, OSError) as problem:
            raise SystemExit(f"dump_gradients: {problem}") from None
    else:
        dump_small(options, console)
    size = options.output.stat().st_size / 1e6
    console.print(
        f"wrote {options.output}: {size:.0f} MB, {time.perf_counter() - start:.0f} s",
        soft_wrap=True,
    )


def dump_real(options: Config) -> None:
    """Write gradients of a checkpoint, tensor by tensor [workers, *shape]."""
    check_folder(options.checkpoint, "--checkpoint")
    layers = checkpoint.read_config(options.checkpoint).num_hidden_layers
    if missing := [layer for layer in options.layers if not 0 <= layer < layers]:
        raise SystemExit(f"--layers has {missing}: the model has layers 0 to {layers - 1}.")
    arrays: dict[str, list[np.ndarray]] = {}
    of_workers = {"workers": options.workers, "batch": options.batch, "context": options.context}
    for gradient in worker_gradients(options.checkpoint, options.text, **of_workers):
        for name, leaf in gradient.items():
            if kind_of(name) in options.kinds and layer_of(name) in (None, *options.layers):
                every = options.embedding_every if kind_of(name) == "embedding" else 1
                # A copy, as a view would keep all rows.
                arrays.setdefault(name, []).append(leaf[::every].copy() if every > 1 else leaf)
    if not arrays:
        raise SystemExit("--kinds and --layers leave no tensor. Give some that the model has.")
    np.savez(options.output, **{name: np.stack(leaves) for name, leaves in arrays.items()})


def dump_small(options: Config, console: Console) -> None:
    """Write gradients of several steps of a small model, which is trained here."""
    corpora = load_corpora()
    if options.model == "decoder":
        structure, params = new_decoder(small_config(corpora.vocabulary), options.seed)
    else:
        structure, params = new_model(ModelConfig(corpora.vocabulary), options.seed)
    with console.status("Pre-training"):
        params = pretrain(
            structure, params, corpora.source_code, steps=options.pretrain_steps, seed=options.seed
        )
    snapshots = gradient_snapshots(
        structure,
        params,
        corpora.reference,
        workers=options.workers,
        steps=options.steps,
        seed=options.seed,
    )
    with console.status("Fine-tuning"):
        save_snapshots(options.output, snapshots)


if __name__ == "__main__":
    run(main, __doc__)
