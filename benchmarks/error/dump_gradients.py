"""Gradients that workers meet while fine-tuning a small language model, written to a file.

    python -m benchmarks.error.dump_gradients --workers 16 --output gradients.npz
    dynamiq-jax compare --gradients gradients.npz --workers 8 16

Training takes the exact mean; the file has one array STEP/PARAMETER of [workers, *shape] for each
step and parameter. For your own model, write such a file with np.savez, or as safetensors.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from benchmarks.training.small_lm.corpora import load_corpora
from benchmarks.training.small_lm.gradients import gradient_snapshots, save_snapshots
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import pretrain
from benchmarks.training.small_lm.training import new_model
from examples.llm.demo import new_decoder, small_config


@dataclasses.dataclass(frozen=True)
class Options:
    """Write the gradients of several training steps, of every worker, to an .npz file."""

    output: Path = Path("gradients.npz")
    """File to write."""

    model: Literal["transformer", "decoder"] = "transformer"
    """What is trained: the small transformer of the benchmarks, or the decoder of the Llama family
    that examples.finetune_llm makes."""

    workers: int = 16
    """Workers whose gradients are written; eight train, however many these are."""

    steps: tuple[int, ...] = (20, 100, 200)
    """Training steps, from 0; training ends after the last."""

    pretrain_steps: int = 240
    """Steps of pre-training on source code before."""

    seed: int = 0
    """Chooses the first weights and the batches."""


def main(options: Options) -> None:
    if not options.output.absolute().parent.is_dir():
        raise SystemExit(f"--output is {options.output}: no such folder. Make it.")
    if options.workers < 1 or not options.steps or min(options.steps) < 0:
        raise SystemExit("--workers and --steps: give at least one worker and one step from 0.")
    console, start = Console(), time.perf_counter()
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
    size = options.output.stat().st_size / 1e6
    console.print(
        f"wrote {options.output}: {size:.0f} MB, {time.perf_counter() - start:.0f} s",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
