"""Final loss of fine-tuning a small language model with every method: what an error of one
all-reduce is worth, and where error feedback makes up for it.

    python -m benchmarks.training.final_loss

Workers are virtual devices of this machine. All runs start from the same weights and see the same
batches in the same order; a seed changes batches and rounding.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import dynamiq_jax as dq
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.every_run import batches_of, train_every
from benchmarks.training.muon import muon
from benchmarks.training.small_lm.corpora import Corpora, all_windows, load_corpora
from benchmarks.training.small_lm.pretraining import (
    Params,
    adamw,
    evaluator,
    loss_of,
    make_optimizer,
)
from benchmarks.training.small_lm.training import pretrained
from dynamiq_jax._measurement.settings import Setting, installed, parse_setting

TITLE = "Evaluation loss after fine-tuning, against the exact mean"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    methods: tuple[str, ...] = installed(
        (  # the first is what the others are compared with
            "exact",
            "dynamiq:5",
            "mxfp8",
            "blockint:5",
            "dynamiq:4",
            "blockint:4",
            "dynamiq:3",
            "blockint:3",
            "mxfp4",
            "thc",
            "topk_chunked:4",
            "ef+topk_chunked:4",
            "powersgd",
            "ef+powersgd",
            "omnireduce",
            "ef+topk_chunked:2",
            "ef+arc_top_k:2",
            "ef+arc_top_k:4",
            "ef21m+exact",
            "ef21m+arc_top_k:4:inner=exact",
            "ef+split_sketch:2",
            "ef+split_sketch:4",
            "ef+marsit",
            "gc+marsit",
            "entropy_coded:agreement=0.1",
            "thc:sum_bits=5",
        )
    )
    topology: str = "ring"
    workers: int = 4
    batch: int = 4  # windows of each worker and step
    steps: int = 120
    learning_rate: float = 2e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    context: int = 128
    seeds: tuple[int, ...] = (0, 1, 2)
    pretrain_steps: int = 240
    save: bool = True  # write the result to benchmarks/results/final_loss.json, or ..._muon.json
    resume: bool = True  # take the losses of methods from there, if those of the first are the same

    @property
    def output(self) -> Path:
        """The result file."""
        adamw = self.optimizer == "adamw"
        return files.path_of("final_loss" if adamw else f"final_loss_{self.optimizer}")


def train_step(
    structure: Any, setting: Setting, config: Config, seed: int
) -> tuple[Callable[[Params], Any], Callable[..., Any]]:
    """Return functions that make the state of a run and take one step of it."""
    reduce = dq.all_reduce_gradients(
        "data", method=dq.Compression(setting.method, setting.topology), seed=seed
    )
    rule = {"adamw": adamw, "muon": muon}[config.optimizer]
    optimizer = optax.chain(reduce, make_optimizer(config.learning_rate, config.steps, rule))
    gradient = jax.grad(loss_of(structure))
    mesh = jax.make_mesh((config.workers,), ("data",), axis_types=(AxisType.Auto,))
    specs = (dq.AllReduceState(step=P(), method=P("data"), metrics=P()), P())

    def local(params: Params, state: Any, batches: jax.Array) -> tuple[Params, Any]:
        updates, state = optimizer.update(gradient(params, batches[0]), state, params)
        return optax.apply_updates(params, updates), state

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )

    init = mapped(optimizer.init, P(), specs)
    return init, mapped(local, (P(), specs, P("data")), (P(), specs))


def final_loss(
    structure: Any, params: Params, corpora: Corpora, setting: Setting, config: Config, seed: int
) -> float:
    """Fine-tune and return the evaluation loss, nats per token."""
    init, step = train_step(structure, setting, config, seed)
    state = init(params)
    for tokens in batches_of(corpora.reference, config, seed):
        params, state = step(params, state, tokens)
    return evaluator(structure, all_windows(corpora.held_out, context=config.context))(params)


COLUMNS = (
    Column("method", "method"),
    Column("bits", "bits", "{:.2f}"),
    Column("loss, mean over seeds", lambda row: np.mean(row["losses"]), "{:.4f}"),
    Column("off", lambda row: np.mean(row["off"]), "{:+.2%}"),
    Column("of each seed", lambda row: "  ".join(f"{off:+.2%}" for off in row["off"])),
)


@benchmark("final_loss")
def main(config: Config) -> Iterator[Report]:
    """Train with every method; report after each, since a run takes long."""
    jax.config.update("jax_num_cpu_devices", config.workers)
    corpora = load_corpora()
    with Console().status("Pre-training"):
        structure, params = pretrained(corpora, steps=config.pretrain_steps)
    shapes = jax.eval_shape(lambda: params)
    settings = {
        name: parse_setting(f"{name}:{config.topology}", "--methods") for name in config.methods
    }
    known = earlier_losses(config) if config.resume else {}
    results: list[dict[str, Any]] = []

    def make(name: str) -> Callable[[int], float]:
        return functools.partial(final_loss, structure, params, corpora, settings[name], config)

    for name, losses in train_every(config.methods, config.seeds, make, known, first_again=True):
        exact = np.array(results[0]["losses"] if results else losses)
        bits = wire_bits(settings[name], shapes, config.workers)
        off = (np.array(losses) / exact - 1).tolist()
        results.append({"method": name, "bits": bits, "losses": losses, "off": off})
        done = config.methods[: len(results)]
        yield Report(
            results=results,
            shown=[table(TITLE, COLUMNS, results)],
            options=files.options_of(config) | {"methods": done},
        )


def earlier_losses(config: Config) -> dict[str, list[float]]:
    """Return method to losses of the result file, if its other options are the same."""
    options = dataclasses.asdict(config)
    ignored = ("methods", "save", "resume", "optimizer")
    rows = files.earlier_results(config.output, options, but=ignored)
    return {row["method"]: row["losses"] for row in rows or ()}


def wire_bits(setting: Setting, shapes: Any, workers: int) -> float:
    """Return the bits of a coordinate on the wire, for all leaves that training compresses."""
    return dq.wire_report(
        shapes, workers, method=dq.Compression(setting.method, setting.topology)
    ).bits


if __name__ == "__main__":
    run(main, __doc__)
