"""`dynamiq-jax compare`: every method on the same gradients."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import tyro
from rich.table import Table

from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate, parse_size
from dynamiq_jax._measurement import gradient_files
from dynamiq_jax._measurement.gradient_files import Gradients, of_workers
from dynamiq_jax._measurement.gradients import worker_gradients
from dynamiq_jax._measurement.settings import PSUM, Setting, installed, parse_settings
from dynamiq_jax._measurement.simulate import Simulation, codec_ns, geometric_mean, make_devices
from dynamiq_jax.topologies import TOPOLOGIES

DEFAULTS = installed(
    (
        *("bf16", "dynamiq:3", "dynamiq:4", "dynamiq:5", "dynamiq:6", "dynamiq:8.5", "paper:5"),
        *("blockint:4", "blockint:5", "blockint:6", "blockint:8"),
        *("mxfp4", "mxfp6", "mxfp8", "mxint8"),
        *("thc", "entropy_coded:agreement=0.1", "flash_communication:5", "omnireduce"),
        *("topk_chunked:5", "arc_top_k:5", "top_k:5", "rand_k:5", "split_sketch:5"),
        *("powersgd", "marsit"),
    )
)
_COLUMNS = 1024  # of a made-up gradient: some methods take it as more than a vector


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare all methods on the same gradients: error, bits on the wire, time.

    Simulates an all-reduce of N workers on this machine, with the program that real workers run,
    for each method, topology and number of workers. Gradients come from a file, such as one that
    `python -m benchmarks.error.dump_gradients --output FILE` writes, or are made up: rows of 256
    whose magnitudes spread as in a language model's gradients. Arrays of a file that training sums
    exactly, those below the default of dq.Compression.exact_below, are left out of errors and bits.

    Errors are those of one all-reduce. A method that is biased, or meant for error feedback, may
    train better or worse than its error says.
    """

    gradients: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """.npz or .safetensors with arrays [workers, *shape], named PARAMETER or STEP/PARAMETER."""

    methods: tuple[str, ...] = DEFAULTS
    """[ef+|gc+|ef21m+]METHOD[:BITS][:FIELD=VALUE]... The error of a wrong one lists the possible
    ones."""

    topologies: tuple[str, ...] = ("ring",)
    """ring, butterfly, all_to_all."""

    workers: tuple[int, ...] = (8,)
    """How many workers, up to 64; the first of those in the file."""

    size: str | None = None
    """Float32 coordinates of made-up gradients, in whole rows of 1024; 5M by default."""

    seeds: int = 1
    """Rounding seeds that errors are averaged over."""

    link: str = "10gbit"
    """Speed of each worker's link, for the time that an all-reduce would take with the codec as
    fast as here, on one core of a CPU."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write everything that was measured, with versions and hardware, to this file."""

    def run(self) -> int:
        """Simulate and report; return the exit status."""
        rate = parse_rate(self.link, "--link")
        self._check()
        names = [f"{m}:{t}" for t in self.topologies for m in self.methods]
        settings = parse_settings(names, "--methods")
        options.check_outputs(self.json)
        cases = [
            (setting, count)
            for count in self.workers
            for setting in settings
            if setting.topology is not None and setting.topology.supports(count)
        ]
        skipped = len(names) * len(self.workers) - len(cases)
        if not cases:
            raise CommandError(
                f"--topologies {' '.join(self.topologies)} does not support --workers "
                f"{' '.join(map(str, self.workers))}. Give 4 or 8, or --topologies ring."
            )
        make_devices(max(self.workers))
        gradients = self._load()
        console = tables.console()
        with tables.progress(console, "compare", len(cases) * (1 + len(gradients))) as advance:
            rows = [self._row(setting, count, gradients, advance) for setting, count in cases]
        records.keep(self, "cpu", rows)
        for count in self.workers:
            at_count = [row for row in rows if row["workers"] == count]
            if at_count:
                console.print(compare_table(at_count, rate))
        if skipped:
            console.print(f"{skipped} left out: topologies that do not support so many workers.")
        return tables.warn_unequal(console, rows)

    def _check(self) -> None:
        if PSUM in self.methods:
            raise CommandError(
                f"--methods: {PSUM!r} is not simulated. Give 'exact', sums without compression on "
                "the same topologies."
            )
        for method in self.methods:
            if given := [part for part in method.split(":") if part in TOPOLOGIES]:
                raise CommandError(
                    f"--methods: {method!r} has a topology. Give it as --topologies {given[0]}."
                )
        parse_settings(self.methods, "--methods")  # an error has the name as it was given
        if self.gradients is not None and self.size is not None:
            raise CommandError("--size is of made-up gradients. Give it, or --gradients.")
        for topology in self.topologies:
            if topology not in TOPOLOGIES:
                raise CommandError(
                    f"--topologies: {topology!r} is not known. Give some of {sorted(TOPOLOGIES)}."
                )
        for count in self.workers:
            options.check_range("--workers", count, 2, 64)
        if not self.workers or not self.topologies:
            raise CommandError("--workers and --topologies: give at least one of each.")
        options.check_range("--seeds", self.seeds, 1)

    def _load(self) -> Mapping[str, Gradients]:
        """Return label of a training step to gradients."""
        if self.gradients is not None:
            steps = gradient_files.load(self.gradients)
            gradient_files.check_sums(self.gradients, steps, self.workers)
            return steps
        rows = max(1, parse_size(self.size or "5M", "--size") // _COLUMNS)
        drawn = worker_gradients(max(self.workers), rows * _COLUMNS, seed=0)
        return {"made up": {"gradient": drawn.reshape(-1, rows, _COLUMNS)}}

    def _row(
        self,
        setting: Setting,
        workers: int,
        gradients: Mapping[str, Gradients],
        done: Callable[[str], None],
    ) -> dict[str, Any]:
        """Simulate a setting on the first workers; return a row for the table and the file."""
        name, at = setting.name, f"{workers} workers"
        chosen = {step: of_workers(tree, workers) for step, tree in gradients.items()}
        first = next(iter(chosen.values()))
        own = {name: leaf[0] for name, leaf in first.items()}
        sent = setting.wire_report(own, workers).bytes_per_worker
        simulation = Simulation(setting, first)
        done(f"compiled {name}, {at}")
        simulated = {}
        for step, tree in chosen.items():
            simulated[step] = simulation(tree, range(self.seeds))
            done(f"{name}, {at}")
        found = simulated.values()
        size = sum(leaf.size for leaf in own.values())
        measured = codec_ns(min(each.seconds for each in found), size, workers)
        method, _, topology = name.rpartition(":")
        return {
            "setting": name,
            "method": method,
            "topology": topology,
            "workers": workers,
            "size": size,
            "bits": 8 * sent / (2 * (workers - 1) / workers * size),
            "bytes_per_worker": sent,
            "codec_ns": measured,  # of one core, for each coordinate
            "seconds": 8 * sent / parse_rate(self.link, "--link") + 1e-9 * measured * size,
            "replicas_equal": all(each.replicas_equal for each in found),
            "steps": {step: dataclasses.asdict(each) for step, each in simulated.items()},
            "vnmse": geometric_mean(each.vnmse for each in found),
            "relative": geometric_mean(each.relative for each in found),
            "above_half": fmean(each.above_half for each in found),
        }


def compare_table(rows: Sequence[dict[str, Any]], rate: float) -> Table:
    """Make the table of one number of workers."""
    steps = list(rows[0]["steps"])
    table = tables.table(
        f"{rows[0]['workers']} workers, {rows[0]['size']:,} float32 coordinates",
        ("method", "topology"),
        (
            "bits",
            *(f"vNMSE {step}".strip() for step in steps),
            "of a super-group",
            "above half",
            "gain",
            "codec ns",
            f"at {format_rate(rate)}",
        ),
    )
    for row in rows:
        of_steps = list(row["steps"].values())
        table.add_row(
            row["method"],
            row["topology"],
            f"{row['bits']:.2f}",
            *(f"{each['vnmse']:.2e}" for each in of_steps),
            f"{row['relative']:.1e}",
            f"{row['above_half']:.1%}",
            f"{fmean(each['gain'] for each in of_steps):.4f}",
            f"{row['codec_ns']:.1f}",
            format_seconds(row["seconds"]),
        )
    table.caption = (
        "of a super-group: mean over groups of 256 of their relative squared error. above half: "
        "share of those whose squared error is above half of their squared norm. gain: the "
        "result's share of the truth, 1 if unbiased. codec ns: of one CPU core, for each "
        "coordinate of each worker. at ...: wire and codec of one all-reduce. Arrays of fewer than "
        f"{gradient_files.LARGE} coordinates a worker are left out: training sums them exactly."
    )
    return table
