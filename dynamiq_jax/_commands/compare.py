"""`dynamiq-jax compare`: every method on the same gradients."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.table import Table

from dynamiq_jax._commands import compare_plot
from dynamiq_jax._workshop import gradient_files, tables
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.gradient_files import Gradients
from dynamiq_jax._workshop.gradients import worker_gradient
from dynamiq_jax._workshop.settings import PSUM, Setting, parse_settings, topologies_in
from dynamiq_jax._workshop.simulate import Simulation, codec_ns
from dynamiq_jax._workshop.units import (
    check_codec_ns,
    format_rate,
    format_seconds,
    parse_rate,
    parse_size,
)
from dynamiq_jax.topologies import TOPOLOGIES, FixedTopology

DEFAULTS = (
    "bf16",
    "dynamiq:3",
    "dynamiq:4",
    "dynamiq:5",
    "dynamiq:6",
    "dynamiq:8.5",
    "paper:5",
    "blockint:4",
    "blockint:5",
    "blockint:6",
    "blockint:8",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "mxint8",
    "thc",
    "flash_communication:5",
    "omnireduce",
    "topk_chunked:5",
    "powersgd",
)

_COLUMNS = 1024  # of a made-up gradient


@dataclasses.dataclass(frozen=True)
class Compare:
    """Every method on the same gradients: error, bits on the wire, time.

    Simulates an all-reduce of N workers on this machine, with the program that real workers run,
    for each method, topology and number of workers. Gradients come from a file, such as one that
    `python examples/dump_gradients.py --output FILE` writes, or are made up: rows of 256 whose
    magnitudes spread as in a language model's gradients.

    Errors are those of one all-reduce. A method that is biased, or meant for error feedback, may
    train better or worse than its error says.
    """

    gradients: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """.npz or .safetensors with arrays [workers, *shape], named PARAMETER or STEP/PARAMETER."""

    methods: tuple[str, ...] = DEFAULTS
    """METHOD[:BITS][:FIELD=VALUE]. A wrong one lists the possible ones."""

    topologies: tuple[str, ...] = ("ring",)
    """ring, butterfly, all_to_all."""

    workers: tuple[int, ...] = (8,)
    """How many workers, up to 64; the first of those in the file."""

    size: str = "5M"
    """Float32 coordinates of made-up gradients, in whole rows of 1024."""

    seeds: int = 1
    """Rounding seeds that errors are averaged over."""

    link: str = "10gbit"
    """Speed of each worker's link, for the time that an all-reduce would take."""

    codec_ns: float | None = None
    """Nanoseconds of codec of a worker for each coordinate, as in `advise`, of all methods alike,
    for that time: 0.02 is what a kernel at the memory speed of a large GPU takes. By default what
    was measured here, on one core of a CPU."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was measured, with versions and hardware, to this file."""

    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Draw error against bits, time and workers to this file (.png, .svg or .pdf)."""

    def run(self) -> int:
        """Simulates and reports; returns the exit status."""
        rate = parse_rate(self.link, "--link")
        self._check()
        names = [f"{m}:{t}" for t in self.topologies for m in self.methods]
        settings = parse_settings(names, "--methods")
        tables.check_outputs(self.json, self.plot)
        # Simulated workers share one device, of which a CPU has the memory.
        jax.config.update("jax_platforms", "cpu")
        steps = self._load()
        console = tables.console()
        cases = [
            (setting, count)
            for count in self.workers
            for setting in settings
            if isinstance(setting.topology, FixedTopology) and setting.topology.supports(count)
        ]
        skipped = len(names) * len(self.workers) - len(cases)
        if not cases:
            raise CommandError(
                f"--topologies {self.topologies} do not support any of --workers {self.workers}."
            )
        rows = []
        with tables.progress(console, "compare", len(cases) * (1 + len(steps))) as advance:
            for setting, count in cases:
                rows.append(_compare(setting, count, steps, self, rate, advance))
        for count in self.workers:
            at_count = [row for row in rows if row["workers"] == count]
            if at_count:
                console.print(compare_table(at_count, rate))
        if skipped:
            console.print(f"{skipped} left out: topologies that do not support so many workers.")
        tables.save_json(self.json, "cpu", dataclasses.asdict(self), rows)
        compare_plot.save(self.plot, rows, f"a link of {format_rate(rate)}")
        return tables.warn_unequal(console, rows)

    def _check(self) -> None:
        for method in self.methods:
            if topologies_in(method):
                raise CommandError(
                    f"--methods: {method!r} names a topology. Give it to --topologies, with which "
                    "every method is measured."
                )
            if method == PSUM:
                raise CommandError(
                    f"--methods: {method!r} is not simulated. Give 'exact', sums without "
                    "compression on the same topologies."
                )
        for topology in self.topologies:
            if topology not in TOPOLOGIES or topology == "auto":
                known = sorted(set(TOPOLOGIES) - {"auto"})
                raise CommandError(
                    f"--topologies: {topology!r} is not known. Give some of {known}."
                )
        for count in self.workers:
            if not 2 <= count <= 64:
                raise CommandError(f"--workers: {count}: give 2 to 64.")
        if not self.workers or not self.topologies:
            raise CommandError("--workers and --topologies: give at least one of each.")
        if self.seeds < 1:
            raise CommandError(f"--seeds is {self.seeds}: give at least 1.")
        check_codec_ns(self.codec_ns)

    def _load(self) -> dict[str, Gradients]:
        most = max(self.workers)
        if self.gradients is None:
            # A matrix, for methods to which a gradient is more than a vector.
            shape = (max(1, parse_size(self.size, "--size") // _COLUMNS), _COLUMNS)
            rows = [worker_gradient(worker, math.prod(shape), seed=0) for worker in range(most)]
            return {"made up": {"gradient": np.stack(rows).reshape(most, *shape)}}
        steps = gradient_files.load(self.gradients)
        for gradients in steps.values():
            there = gradient_files.num_workers(gradients)
            if there < most:
                raise CommandError(
                    f"--workers: {most}, but {self.gradients} holds the gradients of {there}. "
                    f"Give at most {there}."
                )
        for count in self.workers:
            for step, gradients in steps.items():
                if not any(leaf[:count].sum(0, np.float64).any() for leaf in gradients.values()):
                    raise CommandError(
                        f"--gradients {self.gradients}: the sum over {count} workers is zero "
                        f"everywhere{step and f' at {step}'}, and no error can be relative to it. "
                        "Give other gradients, or another number of workers."
                    )
        return steps


def _compare(
    setting: Setting,
    workers: int,
    steps: dict[str, Gradients],
    options: Compare,
    rate: float,
    advance: Any,
) -> dict[str, Any]:
    """What the table and the JSON file say of one setting and number of workers."""
    name, at = setting.name, f"{workers} workers"
    chosen = {
        step: {leaf: values[:workers] for leaf, values in gradients.items()}
        for step, gradients in steps.items()
    }
    first = next(iter(chosen.values()))
    shapes = {
        leaf: jax.ShapeDtypeStruct(values.shape[1:], values.dtype) for leaf, values in first.items()
    }
    report = setting.wire_report(shapes, workers)
    simulation = Simulation(setting, first)
    advance(f"compiled {name}, {at}")
    found = {}
    for step, gradients in chosen.items():
        found[step] = simulation(gradients, range(options.seeds))
        advance(f"{name}, {at}")
    size = sum(math.prod(shape.shape) for shape in shapes.values())
    measured = codec_ns(min(each.seconds for each in found.values()), size, workers)
    codec = measured if options.codec_ns is None else options.codec_ns
    wire_seconds = 8 * report.bytes_per_worker / rate
    method, _, topology = name.rpartition(":")
    return {
        "setting": name,
        "method": method,
        "topology": topology,
        "workers": workers,
        "size": size,
        "bits": 8 * report.bytes_per_worker / (2 * (workers - 1) / workers * size),
        "bytes_per_worker": report.bytes_per_worker,
        "codec_ns": measured,  # of one core, for each coordinate
        "seconds": wire_seconds + 1e-9 * codec * size,  # on the link
        "replicas_equal": all(each.replicas_equal for each in found.values()),
        "steps": {step: dataclasses.asdict(each) for step, each in found.items()},
        "vnmse": _geometric_mean([each.vnmse for each in found.values()]),
        "relative": _geometric_mean([each.relative for each in found.values()]),
    }


def compare_table(rows: Sequence[dict[str, Any]], rate: float) -> Table:
    """Results for one number of workers, as a rich table."""
    steps = list(rows[0]["steps"])
    table = tables.table(
        f"{rows[0]['workers']} workers, {rows[0]['size']:,} float32 coordinates",
        ("method", "topology"),
        (
            "bits",
            *(f"vNMSE {step}".strip() for step in steps),
            "of a super-group",
            "gain",
            "codec ns",
            f"at {format_rate(rate)}",
        ),
    )
    for row in rows:
        found = list(row["steps"].values())
        table.add_row(
            row["method"],
            row["topology"],
            f"{row['bits']:.2f}",
            *(f"{each['vnmse']:.2e}" for each in found),
            f"{row['relative']:.1e}",
            f"{np.mean([each['gain'] for each in found]):.4f}",
            f"{row['codec_ns']:.1f}",
            format_seconds(row["seconds"]),
        )
    table.caption = (
        "of a super-group: mean over groups of 256 of their relative squared error. gain: the "
        "result's share of the truth, 1 if unbiased. codec ns: of one CPU core, for each "
        "coordinate of each worker. at ...: wire and codec of one all-reduce."
    )
    return table


def _geometric_mean(values: Sequence[float]) -> float:
    positive = [value for value in values if value > 0]
    return math.exp(sum(map(math.log, positive)) / len(positive)) if positive else 0.0
