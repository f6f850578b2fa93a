"""Error of DynamiQ on tensors of many kinds, none of which its allocation of widths was fitted to.

    python -m benchmarks.error.allocation
    python -m benchmarks.error.allocation --recipe.model results/smollm2 --recipe.workers 8 \\
        --bits --output benchmarks/results/allocation_real_lm.json

The second call takes gradients of a real language model, whose folder `make demo-llm` makes.

One table is against fixed fractions of widths that are fitted to the very tensor that is summed.
`results/allocation_fitted.json` has their errors, which an earlier version of the library made, but
not for a real model. Two tables are against methods that give all coordinates the same width:
`BlockInt` and MXFP4. `benchmarks.error.tensors` makes the tensors.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.error.tensors import Recipe, load, make, names_of
from benchmarks.harness import files
from benchmarks.harness.columns import Column, table
from benchmarks.harness.command import Report, benchmark, run
from benchmarks.real_lm.folder import check_folder
from dynamiq_jax._console import tables
from dynamiq_jax._measurement.settings import parse_setting
from dynamiq_jax._measurement.simulate import Simulation, make_devices

FITTED = files.path_of("allocation_fitted")

Case = tuple[str, str, int]  # method with its options, topology, workers
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    bits: tuple[float, ...] = (4.0, 5.0, 6.0)  # budgets against fitted fractions
    workers: tuple[int, ...] = (2, 8, 64)  # numbers of workers against fitted fractions
    code_bits: tuple[int, ...] = (3, 4, 5, 6, 8)  # of BlockInt, half a bit less than on the wire
    mxfp4_bits: tuple[float, ...] = (4.25, 5.0)  # budgets against MXFP4, which takes 4.25
    other_workers: tuple[int, ...] = (4,)  # numbers of workers against BlockInt and MXFP4
    topologies: tuple[str, ...] = ("ring", "butterfly", "all_to_all")
    tensors: tuple[str, ...] = ()  # names of tensors; all if none is given
    seeds: int = 2  # rounding seeds that a figure is averaged over
    tolerance: float = 0.02  # relative difference of errors that counts as equal
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    folder: Path = Path(tempfile.gettempdir()) / "dynamiq-jax-tensors"  # tensors are kept here
    save: bool = True  # write the result to the file of `output`
    output: Path = files.path_of("allocation")


@benchmark("allocation")
def main(config: Config) -> Report:
    """Measure every case; the status is 1 if workers got different bits."""
    console = tables.console()
    if config.recipe.model:
        check_folder(config.recipe.model, "--recipe.model")
    unknown = set(config.tensors) - set(known := names_of(config.recipe))
    if unknown:
        raise SystemExit(f"--tensors: no {sorted(unknown)}. Give some of {known}.")
    counts = (*(config.workers if config.bits else ()), *config.other_workers)
    if max(counts, default=1) > config.recipe.workers:
        raise SystemExit(f"--recipe.workers is {config.recipe.workers}. Give more.")
    make_devices(max(counts, default=1))
    names = [name for name in known if name in config.tensors or not config.tensors]
    with console.status("Making tensors") as status:
        folder = make(
            config.recipe, config.folder, names, lambda name: status.update(f"Making {name}")
        )
    measured = measure(config, names, folder)
    vnmse = {
        (row["method"], row["topology"], row["workers"], row["tensor"]): row["vnmse"]
        for row in measured
    }
    results = {
        "against_fitted": against_fitted(vnmse, config, names, fitted(config.recipe)),
        "against_blockint": against_blockint(vnmse, config, names),
        "against_mxfp4": against_mxfp4(vnmse, config, names),
    }
    return Report(
        results=results | {"measured": measured},
        shown=[as_table(name, rows, config.tolerance) for name, rows in results.items() if rows],
        options=files.options_of(config, but=("folder",)),
        status=tables.warn_unequal(console, measured),
    )


# -------------------------------------------------------------------------------------- measuring


def dynamiq(bits: float, rounding: str = "correlated") -> str:
    """Return the name of DynamiQ with a budget and a rounding."""
    return f"dynamiq:{bits:g}" + ("" if rounding == "correlated" else f":rounding={rounding}")


def blockint(code_bits: int, rounding: str) -> str:
    """Return the name of BlockInt with a width and a rounding."""
    return f"blockint:{code_bits}:rounding={rounding}"


def cases(config: Config) -> list[Case]:
    """List everything to compile, each of it once."""
    methods = [(dynamiq(bits), config.workers) for bits in config.bits]
    for code_bits in config.code_bits:
        others = [blockint(code_bits, rounding) for rounding in ("stochastic", "nearest")]
        ours = [dynamiq(code_bits + 0.5, rounding) for rounding in ("correlated", "nearest")]
        methods += [(method, config.other_workers) for method in (*ours, *others)]
    if config.mxfp4_bits:
        methods += [(dynamiq(bits), config.other_workers) for bits in config.mxfp4_bits]
        methods.append(("mxfp4", config.other_workers))
    listed = [
        (method, topology, n)
        for method, workers in methods
        for topology in config.topologies
        for n in workers
    ]
    return list(dict.fromkeys(listed))


def measure(config: Config, names: list[str], folder: Path) -> Rows:
    """Simulate every case on every tensor."""
    rows = []
    every = cases(config)
    with tables.progress(tables.console(), "Simulating", len(every) * len(names)) as done:
        for method, topology, workers in every:
            setting = f"{method}:{topology}"
            parsed, size = parse_setting(setting), config.recipe.size
            zeros = {"gradient": np.zeros((workers, size), np.float32)}
            simulation = Simulation(parsed, zeros)
            bits = parsed.wire_report(size, workers).bits
            for name in names:
                values = {"gradient": load(folder, name, workers)}
                errors = simulation(values, range(config.seeds))
                rows.append(
                    {
                        "setting": setting,
                        "method": method,
                        "topology": topology,
                        "workers": workers,
                        "bits": bits,
                        "tensor": name,
                        "vnmse": errors.vnmse,
                        "gain": errors.gain,
                        "replicas_equal": errors.replicas_equal,
                    }
                )
                done(f"{setting}, {workers} workers, {name}")
    return rows


def fitted(recipe: Recipe) -> dict[tuple[str, str, int, float], float]:
    """Read the errors of fitted fractions: (tensor, topology, workers, bits) to vNMSE. There are
    none if the file is missing, or is of other tensors.
    """
    if recipe.model or not FITTED.exists():
        return {}
    content = json.loads(FITTED.read_text())
    # The file is older than the field `model`.
    made_of = {"model": None} | content["config"]["recipe"]
    if made_of != json.loads(json.dumps(dataclasses.asdict(recipe))):
        return {}
    return {
        (row["tensor"], row["topology"], row["workers"], row["bits"]): row["vnmse"]
        for row in content["results"]
    }


# -------------------------------------------------------------------------------------- comparing

Errors = Mapping[tuple[str, str, int, str], float]  # method, topology, workers, tensor to vNMSE


def places(
    config: Config, names: list[str], workers: tuple[int, ...]
) -> Iterator[tuple[str, str, int]]:
    """Yield every tensor, topology and number of workers."""
    yield from ((name, t, n) for name in names for t in config.topologies for n in workers)


def against_fitted(
    vnmse: Errors,
    config: Config,
    names: list[str],
    references: Mapping[tuple[str, str, int, float], float],
) -> Rows:
    """Compare DynamiQ with fractions that are fitted to the same tensor."""
    rows = []
    for name, topology, workers in places(config, names, config.workers):
        for bits in config.bits:
            error = vnmse[dynamiq(bits), topology, workers, name]
            reference = references.get((name, topology, workers, bits))
            row = _row(name, topology, workers, bits, {"dynamiq": error, "fitted": reference})
            rows.append(row | {"ratios": {"to fitted": _ratio(error, reference)}})
    return rows


def against_blockint(vnmse: Errors, config: Config, names: list[str]) -> Rows:
    """Compare DynamiQ with BlockInt at the same bits on the wire: both unbiased, both rounded to
    nearest, and the unbiased DynamiQ with BlockInt rounded to nearest.
    """
    rows = []
    for name, topology, workers in places(config, names, config.other_workers):
        for code_bits in config.code_bits:
            bits = code_bits + 0.5

            methods = {
                "dynamiq": dynamiq(bits),
                "dynamiq nearest": dynamiq(bits, "nearest"),
                "blockint": blockint(code_bits, "stochastic"),
                "blockint nearest": blockint(code_bits, "nearest"),
            }
            errors = {
                label: vnmse[method, topology, workers, name] for label, method in methods.items()
            }
            ours, our_nearest, theirs, their_nearest = errors.values()
            ratios = {
                "unbiased": _ratio(ours, theirs),
                "nearest": _ratio(our_nearest, their_nearest),
                "unbiased / nearest": _ratio(ours, their_nearest),
            }
            rows.append(_row(name, topology, workers, bits, errors) | {"ratios": ratios})
    return rows


def against_mxfp4(vnmse: Errors, config: Config, names: list[str]) -> Rows:
    """Compare DynamiQ with MXFP4."""
    rows = []
    for name, topology, workers in places(config, names, config.other_workers):
        for bits in config.mxfp4_bits:
            ours = vnmse[dynamiq(bits), topology, workers, name]
            theirs = vnmse["mxfp4", topology, workers, name]
            row = _row(name, topology, workers, bits, {"dynamiq": ours, "mxfp4": theirs})
            rows.append(row | {"ratios": {"to mxfp4": _ratio(ours, theirs)}})
    return rows


def _row(tensor: str, topology: str, workers: int, bits: float, errors: Any) -> dict[str, Any]:
    where = {"tensor": tensor, "topology": topology, "workers": workers, "bits": bits}
    return where | {"vnmse": errors}


def _ratio(error: float, reference: float | None) -> float | None:
    return error / reference if reference else None


# --------------------------------------------------------------------------------------- printing

_TITLES = {
    "against_fitted": "DynamiQ against fractions that are fitted to the same tensor",
    "against_blockint": "DynamiQ against BlockInt, the same bits on the wire",
    "against_mxfp4": "DynamiQ against MXFP4 (4.25 bits)",
}


def as_table(name: str, rows: Rows, tolerance: float) -> Table:
    """Make a table with a line for each row, and the highest ratios as its caption."""
    errors, ratios = rows[0]["vnmse"], rows[0]["ratios"]
    known = {
        kind: [row["ratios"][kind] for row in rows if row["ratios"][kind] is not None]
        for kind in ratios
    }
    columns = (
        Column("tensor", "tensor"),
        Column("topology", "topology"),
        Column("workers", "workers"),
        Column("bits", "bits", "{:g}"),
        *(Column(kind, ("vnmse", kind), "{:.2e}") for kind in errors),
        *(Column(f"ratio, {kind}", ("ratios", kind), "{:.3f}") for kind in ratios),
        Column("verdict", lambda row: verdict(row["ratios"], tolerance)),
    )
    caption = "  ".join(
        f"{kind}: {min(of):.3f} to {max(of):.3f}" for kind, of in known.items() if of
    )
    return table(f"vNMSE: {_TITLES[name]}", columns, rows, caption)


def verdict(ratios: Mapping[str, float | None], tolerance: float) -> str:
    """Return "better", "equal" or "worse", of the highest ratio that is known.

    >>> verdict({"nearest": 1.01}, 0.02), verdict({"unbiased": 0.5, "nearest": 1.1}, 0.02)
    ('equal', 'worse')
    """
    known = [ratio for ratio in ratios.values() if ratio is not None]
    if not known:
        return ""
    if max(known) > 1 + tolerance:
        return "worse"
    return "better" if max(known) < 1 - tolerance else "equal"


if __name__ == "__main__":
    run(main, __doc__)
