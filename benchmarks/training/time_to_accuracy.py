"""Time to accuracy over slow links: how much sooner a compressed run gets where the exact one does.

Hosts emulated on this machine (root and iproute2) train a small language model from the same
pre-trained weights on the same batches, with each setting and on links of each rate. Settings take
turns of a few steps, so that a change of the machine's load meets all. The clock counts training
steps only: a first step, which compiles, is thrown away, and it stands still while the model is
evaluated on text that training never sees.

The target: the exact run (psum) lowers the evaluation loss from that of the pre-trained weights to
the lowest it ever has. The 99 % target is the loss at which it has made 99 % of that way. A run
reaches it where its lowest loss so far crosses it, interpolated between evaluations; one that does
not is reported as "not reached".

A link's rate changes how long a step takes and no bit of its result: parameters of all hosts and
links are compared at every evaluation, and a difference ends the benchmark. So losses are measured
once; other seeds add final losses, on an unlimited link. All hosts share the cores of this
machine, which makes computing and coding slower than on hosts of their own.

    python -m benchmarks.training.time_to_accuracy  # everything
    python -m benchmarks.training.time_to_accuracy --rates 100mbit --settings psum dynamiq:5
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

import dynamiq_jax as dq
from benchmarks.emulation import namespaces
from benchmarks.emulation.python_processes import threads_of_each
from benchmarks.harness import files
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.training.emulated_training import report
from benchmarks.training.emulated_training.rounds import Rounds, parse_all_rounds
from benchmarks.training.emulated_training.run import EmulatedRun, check_identical, trainers
from benchmarks.training.small_lm.corpora import Corpora, all_windows, load_corpora
from benchmarks.training.small_lm.model import ModelConfig
from benchmarks.training.small_lm.pretraining import pretrain
from benchmarks.training.small_lm.training import abstract_model, new_model
from dynamiq_jax._console import options, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import parse_rate
from dynamiq_jax._measurement.settings import PSUM, installed

ALONE_STEPS = 20  # that measure how long a step takes without the all-reduce


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    hosts: int = 4
    """Emulated hosts, one process each."""

    rates: tuple[str, ...] = ("100mbit", "200mbit", "1gbit")
    """Of every link, as tc spells them. Each takes as long as training with every setting."""

    settings: tuple[str, ...] = installed(
        (
            PSUM,
            "bf16:ring",
            "mxfp8:ring",
            "blockint:8:ring",
            "thc:ring",
            "dynamiq:4:ring",
            "dynamiq:5:ring",
            "dynamiq:6:ring",
            "dynamiq:4:all_to_all",
            "dynamiq:5:all_to_all",
            "dynamiq:6:all_to_all",
        )
    )
    """[ef+|gc+|ef21m+]METHOD[:BITS][:TOPOLOGY][:FIELD=VALUE]... psum, the exact run, sets the
    target: keep it. With @STEPS behind it, local SGD: an outer step after so many local ones, such
    as dynamiq:4@20. dynamiq:4@20x3 takes three times as many local steps: they count as one step of
    the others."""

    steps: int = 100
    """Training steps of a run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Choose pre-trained weights, batches and rounding. The first is timed on every link, the
    others only say where training ends."""

    eval_every: int = 5
    """Steps between evaluations; few, since times are interpolated between them."""

    batch: int = 1
    """Windows of each host and step: few, so that the network and not computing takes the time."""

    context: int = 64
    """Tokens that the model reads."""

    learning_rate: float = 2e-3
    """Peak, after a warm-up over a tenth of the steps; then it decays to zero."""

    pretrain_steps: int = 150
    """Steps of pre-training, on one device and without compression, once for each seed."""

    width: int = 256
    """Features of a token."""

    layers: int = 2
    """Blocks of the transformer."""

    timeout: float = 120.0
    """Seconds without an answer, beyond what compiling and the link take, after which all ends."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = files.path_of("time_to_accuracy")
    """Where results go, after every link and seed; the plot goes beside it, as .png."""

    def stops(self) -> list[int]:
        """Return the numbers of steps after which a run is looked at."""
        return [*range(0, self.steps, self.eval_every), self.steps]


def check(config: Config) -> tuple[dict[str, Rounds], list[float]]:
    """Return settings and rates; raise CommandError if an option makes no sense."""
    settings = parse_all_rounds(config.settings)
    if all(rounds.setting.method is not None for rounds in settings.values()):
        raise CommandError(f"--settings: add {PSUM}, whose loss is the target of all others.")
    least = {"steps": 1, "eval_every": 1, "batch": 1, "context": 1, "pretrain_steps": 1}
    for name, low in (least | {"layers": 1, "timeout": 1}).items():
        options.check_range(f"--{name.replace('_', '-')}", getattr(config, name), low)
    if not 2 <= config.hosts <= namespaces.MAX_HOSTS:
        raise CommandError(f"--hosts is {config.hosts}: give 2 to {namespaces.MAX_HOSTS}.")
    if config.width < 8 or config.width % 8:  # heads with an even number of features
        raise CommandError(f"--width is {config.width}: give a multiple of 8.")
    rates = [parse_rate(text, "--rates") for text in config.rates]
    for name, values in (("rates", rates), ("seeds", config.seeds)):
        if not values or len(set(values)) < len(values) or min(values) < 0:
            given = " ".join(map(str, getattr(config, name))) or "empty"
            raise CommandError(f"--{name} is {given}: give one or more, each once, none negative.")
    if not config.output.absolute().parent.is_dir():
        raise CommandError(f"--output is {config.output}: its folder does not exist. Make it.")
    namespaces.check_possible()
    return settings, rates


def write_text(config: Config, corpora: Corpora, folder: Path) -> None:
    """Write the text to train on and that to evaluate on."""
    try:
        held_out = all_windows(corpora.held_out, context=config.context, multiple_of=config.hosts)
    except ValueError as error:
        raise CommandError(str(error)) from None
    np.savez(folder / "text.npz", corpus=corpora.reference, held_out=held_out)


def write_weights(
    config: Config,
    model: ModelConfig,
    corpora: Corpora,
    folder: Path,
    advance: Callable[[str], None],
) -> None:
    """Write pre-trained weights of every seed."""
    for seed in config.seeds:
        structure, params = new_model(model, seed)
        params = pretrain(
            structure,
            params,
            corpora.source_code,
            steps=config.pretrain_steps,
            batch=8,
            context=config.context,
            seed=seed,
            on_step=lambda step, loss: advance(""),
        )
        np.savez(folder / f"weights{seed}.npz", *map(np.asarray, jax.tree.leaves(params)))


def costs(settings: dict[str, Rounds], shapes: Any, hosts: int) -> dict[str, dict[str, float]]:
    """Return the bytes of a host in an all-reduce, their mean over steps, and bits, by setting."""
    found = {}
    for name, rounds in settings.items():
        setting = rounds.setting
        cost = setting.wire_report(shapes, hosts)  # refuses what so many hosts cannot do
        bits = 32.0
        if setting.method is not None:
            cost = dq.wire_report(
                shapes, hosts, method=dq.Compression(setting.method, setting.topology)
            )
            bits = cost.bits
        reductions = rounds.times / (rounds.every or 1)  # in a step
        found[name] = {
            "bytes_per_worker": cost.bytes_per_worker,
            "bytes_a_step": cost.bytes_per_worker * reductions,
            "bits": bits * reductions,
        }
    return found


@benchmark("time_to_accuracy")
def main(config: Config) -> Iterator[Report]:
    """Train with all settings; report after each link and seed, since all of them take long."""
    settings, rates = check(config)
    jax.config.update("jax_platforms", "cpu")  # as the hosts have it
    console = tables.console()
    namespaces.remove_stale()
    corpora = load_corpora()
    model = ModelConfig(corpora.vocabulary, width=config.width, layers=config.layers)
    _, shapes = abstract_model(model)
    cost = costs(settings, shapes, config.hosts)
    sent = {name: int(of["bytes_per_worker"]) for name, of in cost.items()}
    first, *others = config.seeds
    rounds = [(rate, first) for rate in rates] + [(None, seed) for seed in others]
    stops = config.stops()
    turns = len(rounds) * len(settings) * len(stops)
    training = {"model": dataclasses.asdict(model)} | {
        name: getattr(config, name) for name in ("batch", "context", "learning_rate", "steps")
    }
    runs: list[EmulatedRun] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(config, corpora, folder)
        pretraining = config.pretrain_steps * len(config.seeds)
        with tables.progress(console, "pre-training", pretraining) as advance:
            write_weights(config, model, corpora, folder, advance)
        with (
            trainers(config.hosts, folder, config.timeout, training) as hosts,
            tables.progress(console, "training", turns) as advance,
        ):
            alone = hosts.alone(first, min(ALONE_STEPS, config.steps))
            for rate, seed in rounds:
                # Losses do not depend on the link: those of the first one count for all.
                evaluate_at = stops if rate == rates[0] else [stops[-1]] if rate is None else []
                runs += hosts.train(
                    sent, seed, rate=rate, stops=stops, evaluate_at=evaluate_at, advance=advance
                )
                check_identical(runs)
                results = report.summary(runs, cost, alone)
                results["threads"] = threads_of_each(config.hosts)
                results["coordinates"] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
                yield Report(
                    results=results,
                    shown=report.as_tables(results),
                    draw=functools.partial(report.plot, results),
                )


if __name__ == "__main__":
    run(main, __doc__)
