"""Tables and sentences of the pages that come from result files or from the library, and scripts.

    python -m docs.scripts.tables

A page has `<!-- table: NAME -->` and `<!-- end -->` around each table, and `<!-- script: NAME -->`
around the text of NAME.py in the examples of either house. This script writes the lines between
them. docs/checks/test_pages.py fails where a page and this script disagree.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

import dynamiq_jax as dq
from benchmarks import environments as fresh
from docs.scripts import (
    bucket_tables,
    choice_tables,
    cpu_tables,
    error_tables,
    global_tables,
    gpu_tables,
    loss_tables,
    method_tables,
    real_lm_tables,
    sentences,
    tpu_tables,
    trainer_tables,
    training_tables,
)
from docs.scripts.advised import at_five_bits, break_even_gbit, gain_of_a_step
from docs.scripts.result_files import RESULTS, exponent, markdown, mean, results_of
from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._console.units import format_seconds
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS
from dynamiq_jax.methods import METHODS, resolve_method
from dynamiq_jax.topologies import TOPOLOGIES

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
EXAMPLES = (ROOT / "examples", ROOT / "research" / "examples")

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
_SCRIPT = re.compile(r"(<!-- script: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def methods() -> str:
    """Write the bits of the methods of the product, with their errors and times."""
    errors = {row["method"]: row["vnmse"] for row in results_of("compare_real_lm")}
    compared = [*results_of("compare_ring"), *results_of("compare_low_bits")]
    times = {row["setting"]: row["codec_ns"] for row in compared if row["workers"] == 8}
    # How the settings of the result files spell the defaults.
    settings = {"dynamiq": "dynamiq:5", "blockint": "blockint:8"}
    gradient = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    rows = []
    for name in METHODS.own:
        method = resolve_method(name)
        bits = [f"{dq.wire_report(gradient, n, method=method).bits:.2f}" for n in (8, 64)]
        setting = settings.get(name, name)
        error = exponent(errors[setting]) if setting in errors else ""
        time = times.get(f"{setting}:ring")
        rows.append([f'`"{name}"`', *bits, error, "" if time is None else f"{time:.0f}"])
    header = ["name", "bits, 8 workers", "bits, 64 workers", "vNMSE", "codec ns a coordinate"]
    return markdown(header, rows)


def break_even() -> str:
    """Write the speed of a link below which 5 bits beat `psum`, by `dynamiq-jax advise`."""
    rows = []
    for device, size in (("gpu", "7G"), ("cpu", "100M")):
        for gradient in ("f32", "bf16"):
            gbit = break_even_gbit(device, size, gradient)
            what = {"f32": "float32", "bf16": "bfloat16"}[gradient]
            ns = f"{CODEC_SPEEDS[device].ns_per_coordinate:g} ns"
            rows.append([device.upper(), ns, what, f"{gbit:g} Gbit/s"])
    header = ["codec on a", "for a coordinate", "`psum` of", "compress below"]
    return markdown(header, rows)


def steps() -> str:
    """Write the times of a training step on several links by `dynamiq-jax advise --size 7G`."""
    rows = []
    for link in ("1gbit", "10gbit", "25gbit", "100gbit", "400gbit", "1600gbit", "3600gbit"):
        plain, ours = at_five_bits(Advise(link=link, size="7G"))
        rows.append(
            [
                link.replace("gbit", " Gbit/s") + (", NVLink" if link == "3600gbit" else ""),
                format_seconds(plain.all_reduce.total),
                format_seconds(ours.all_reduce.total),
                f"{plain.all_reduce.total / ours.all_reduce.total:.2f}x",
                f"{gain_of_a_step(link):.2f}x",
                f"{gain_of_a_step(link, overlap=0.5):.2f}x",
            ]
        )
    header = ["link of each worker", "`psum`, bfloat16", "5 bits", "all-reduce", "step"]
    return markdown([*header, "step, half of it hides transfers"], rows)


def topologies() -> str:
    """Write steps and error of every topology over 16 workers: error.json."""
    measured: dict[str, list[float]] = {}
    for row in results_of("error"):
        # The same order of training steps for each.
        if row["preset"] == "default" and row["workers"] == 16 and abs(row["bits"] - 5) < 0.1:
            measured.setdefault(row["topology"], []).append(row["vnmse"])
    rows = []
    for name in ("ring", "butterfly", "all_to_all"):
        topology = TOPOLOGIES[name]()
        ratios = [a / b for a, b in zip(measured[name], measured["ring"], strict=True)]
        rows.append(
            [
                f'`"{name}"`',
                str(topology.steps(16)),
                f"{mean(ratios):.2f}",
                *(f"{topology.error_growth(n, agreement=0.1):.1f}" for n in (4, 16, 64)),
            ]
        )
    header = ["topology", "steps, 16 workers", "vNMSE, 16 workers, ring = 1"]
    return markdown([*header, *(f"law, {n} workers" for n in (4, 16, 64))], rows)


def emulated() -> str:
    """Write the times of four hosts that `benchmarks.emulation` measured: cost_model.json."""
    points = results_of("cost_model")["points"]
    seconds = {(p["rate"], p["hosts"], p["setting"]): p["seconds"] for p in points}
    rows = []
    for rate in sorted({rate for rate, hosts, _ in seconds if hosts == 4}):
        psum, bf16, *ours = (
            seconds[rate, 4, setting]
            for setting in ("psum", "bf16:ring", "dynamiq:5:ring", "dynamiq:4:ring")
        )
        faster = [f"{s:.2f} s: {psum / s:.1f}x, {bf16 / s:.1f}x" for s in ours]
        link = f"{rate / 1e6:g} Mbit/s"
        rows.append([link, f"{psum:.2f} s", f"{bf16:.2f} s", *faster])
    return markdown(["link", "`lax.psum`", "BF16 ring", "5 bits, ring", "4 bits, ring"], rows)


def accuracy() -> str:
    """Write times to the exact run's 99% target, and final losses: time_to_accuracy.json."""
    results = results_of("time_to_accuracy")
    offs = {row["setting"]: row["off"].values() for row in results["final_losses"]}
    ranges = {
        setting: f"{mean([*off]):+.2%} ({min(off):+.2%} to {max(off):+.2%})"
        for setting, off in offs.items()
    }
    settings = dict.fromkeys(row["setting"] for row in results["links"])
    for bits in (4, 6):  # an all-to-all at 5 bits is enough
        del settings[f"dynamiq:{bits}:all_to_all"]
    header, rows = _times(settings, ("bf16:ring", "mxfp8:ring"))
    rows = [[*row, ranges[setting]] for setting, row in zip(settings, rows, strict=True)]
    return markdown([*header, "final loss (range of the seeds)"], rows)


def headline() -> str:
    """Write the rows of `accuracy` that a first look needs, with one ratio."""
    final = {
        row["setting"]: row["mean_off"] for row in results_of("time_to_accuracy")["final_losses"]
    }
    settings = ("psum", "bf16:ring", "mxfp8:ring", "dynamiq:5:ring", "dynamiq:4:ring")
    header, rows = _times(settings, ("bf16:ring",), rates=(100e6, 1000e6))
    rows = [[*row, f"{final[setting]:+.2%}"] for setting, row in zip(settings, rows, strict=True)]
    return markdown([*header, "final loss"], rows)


def _times(
    settings: Iterable[str], others: Iterable[str], rates: Iterable[float] = (100e6, 200e6, 1000e6)
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of seconds to the 99 % target, with speed-ups over other settings."""
    links = results_of("time_to_accuracy")["links"]
    bits = {row["setting"]: row["bits"] for row in links}
    reached = {(row["setting"], row["rate"]): row["to_target"]["0.99"]["seconds"] for row in links}
    rows = []
    for setting in settings:
        cells = []
        for rate in rates:
            mine = reached[setting, rate]
            times = [reached[other, rate] for other in others]
            sooner = ", ".join(f"{t / mine:.2f}x" for t in times if mine and t)
            cells.append(f"{mine:.1f} s ({sooner})" if mine else "not reached")
        name = "`lax.psum`, float32" if setting == "psum" else f"`{setting}`"
        rows.append([name, f"{bits[setting]:.2f}", *cells])
    return ["", "bits", *(f"{rate / 1e6:g} Mbit/s" for rate in rates)], rows


def cpu_codec() -> str:
    """Write the time of each operation of the codec on a CPU: codec.json."""
    results = results_of("codec")
    size = max(row["size"] for row in results)
    ns = {(r["operation"], r["method"]): r["ns"] for r in results if r["size"] == size}
    budgets = [method for operation, method in ns if operation == "hop" and "," not in method]
    rows = [
        [operation, *(f"{ns[operation, bits]:.2f}" for bits in budgets)]
        for operation in ("statistics", "reorder", "compress", "hop", "decompress")
    ]
    return markdown(["operation", *budgets], rows)


def compile_times() -> str:
    """Write compile times: compile_time.json."""
    results = results_of("compile_time")
    rows = [
        [str(row["workers"]), *(f"{s:.1f} s" for s in (row["exact"], *row["compressed"].values()))]
        for row in results
    ]
    kinds = (f"`dq.pmean`, {kind}" for kind in results[0]["compressed"])
    return markdown(["workers", "`lax.pmean`", *kinds], rows)


def fresh_environments() -> str:
    """Write what ran in environments that were made from the packages: fresh_environments.json."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in results_of("fresh_environments"):
        versions = (row["versions"][name] for name in ("python", "jax"))
        found.setdefault((*versions, fresh.outcome(row)), []).append(row)
    rows = []
    for case, of in found.items():
        seconds = [row["install"] for row in of]
        sizes = (max(row[key] for row in of) for key in ("bytes", "all bytes"))
        cells = f"{min(seconds):.0f} to {max(seconds):.0f} s", *(f"{s / 1e6:.0f} MB" for s in sizes)
        rows.append([*case, *cells])
    header = ["Python", "JAX", "ran", "`pip install`", "installed", f"with `[{fresh.EXTRA}]`"]
    return markdown(header, rows)


def many_leaves() -> str:
    """Write compile time, memory and step time of trees of many leaves: many_leaves.json."""
    rows = []
    for row in results_of("many_leaves"):
        if row["kind"] != "mixed":
            continue
        exact, ours = row["exact"], row["compressed"]
        cells = [f"{_until_compiled(program):.1f} s" for program in (exact, ours)]
        one = row.get("one bucket")
        cells.append(f"{_until_compiled(one):.1f} s" if one else "")
        if "step" in exact:
            cells += [f"{ours[key] / exact[key]:.2f}" for key in ("bytes", "step")]
        rows.append([f"{row['leaves']:,}", *cells, *[""] * (5 - len(cells))])
    header = ["leaves", "`lax.pmean`", "`dq.pmean`", "`dq.pmean` of one leaf as large"]
    return markdown([*header, "memory over `lax.pmean`", "time of a step over it"], rows)


def _until_compiled(program: dict[str, float]) -> float:
    return sum(program.get(stage, 0.0) for stage in ("trace", "lower", "compile"))


def compressed_step() -> str:
    """Write a step that `dq.compress` wraps beside the same by hand: compressed_step.json."""
    names = {"exact": "exact", "by hand": "`dq.pmean` by hand", "compressed": "`dq.compress`"}
    return markdown(
        ["layers", "step", "trace", "compile", "messages", "MB sent", "time of a step"],
        [
            [
                str(row["layers"]),
                names[step],
                f"{row[step]['trace']:.2f} s",
                f"{row[step]['compile']:.1f} s",
                str(row[step]["messages"]),
                f"{row[step]['bytes'] / 1e6:.2f}",
                f"{row[step]['of by hand']:.2f}",
            ]
            for row in results_of("compressed_step")
            for step in names
        ],
    )


def between_hosts() -> str:
    """Write how much emulated hosts count over the bytes that are shown: between_hosts.json."""
    more = [
        row["counted"] / row["shown"] - 1
        for row in results_of("between_hosts")
        if row["name"] != "psum_scatter"
    ]
    return (
        f"The interfaces of emulated hosts count {min(more):.0%} to {max(more):.0%} more than `by "
        "a host`, with headers, in all sums (`python -m benchmarks.speed.between_hosts`). The "
        "`psum_scatter` of gloo alone sends less.\n"
    )


def in_flight() -> str:
    """Write how often two collectives at once hang: in_flight.json."""
    found = json.loads((RESULTS / "in_flight.json").read_text())
    runs, hangs = found["config"]["runs"], found["results"].pop("in two scans")["hangs"]
    others = sum(counts["hangs"] for counts in found["results"].values())
    return (
        f"Of runs of two processes with two CPU devices each, {hangs} of {runs} hung with "
        f"`dq.pmean` in two independent scans, and {others} in all other forms, each tried "
        f"{runs} times (`python -m benchmarks.speed.in_flight`). A zero does not show that a "
        "program never hangs.\n"
    )


def big_models() -> str:
    """Write compile times and memory of large programs: big_models.json."""
    rows = []
    for row in results_of("big_models"):
        if row["name"].startswith("dense") or "4 layers" in row["name"]:
            continue
        compiled = "seconds" in row
        gigabytes = f"{row['temporary_bytes'] / 1e9:.1f} GB" if compiled else ""
        seconds = f"{row['seconds']:.0f} s" if compiled else f"{row['lower_seconds']:.0f} s"
        rows.append([row["name"], seconds, gigabytes])
    return markdown(["program", "time of one core", "temporary memory"], rows)


def environments() -> str:
    """Write the result files of each machine and version of JAX, with the days of the runs."""
    files: dict[tuple[str, str], list[str]] = {}
    days: dict[tuple[str, str], list[str]] = {}
    for path in sorted(
        (*RESULTS.glob("*.json"), *(ROOT / "research/benchmarks/results").glob("*.json")),
        key=lambda path: path.name,
    ):
        of = json.loads(path.read_text())["environment"]
        cores = f"{of['cores']} cores" if of["cores"] > 1 else "1 core"
        machine = f"{of['cpu']}, {cores}", f"{of['jax']}, {of['python']}"
        files.setdefault(machine, []).append(f"`{path.stem}`")
        days.setdefault(machine, []).append(of["date"].split()[0])
    rows = []
    for machine in sorted(files, key=lambda machine: -len(files[machine])):
        first, last = min(days[machine]), max(days[machine])
        names = ", ".join(files[machine]) if len(files[machine]) < 10 else "all others"
        rows.append([names, *machine, first if first == last else f"{first} to {last}"])
    return markdown(["files", "hardware", "JAX, Python", "date"], rows)


_ALL = (
    methods,
    topologies,
    break_even,
    steps,
    emulated,
    accuracy,
    headline,
    compile_times,
    fresh_environments,
    many_leaves,
    compressed_step,
    between_hosts,
    in_flight,
    big_models,
    environments,
    cpu_codec,
    choice_tables.which_method,
    bucket_tables.buckets_errors,
    bucket_tables.buckets_steps,
    *cpu_tables.ALL,
    *error_tables.ALL,
    *global_tables.ALL,
    *gpu_tables.ALL,
    *loss_tables.ALL,
    *method_tables.ALL,
    *real_lm_tables.ALL,
    *sentences.ALL,
    *tpu_tables.ALL,
    *trainer_tables.ALL,
    *training_tables.ALL,
)
TABLES = {function.__name__: function for function in _ALL}


def rewritten(page: str) -> str:
    """Return the text of a page with its tables and scripts as they should be."""
    page = _SCRIPT.sub(lambda found: found[1] + _script(found[2]) + found[3], page)
    return _TABLE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def _script(name: str) -> str:
    (path,) = (path for path in script_files() if path.stem == name)
    return f"```python\n{path.read_text()}```\n"


def script_files() -> list[Path]:
    """Return the scripts of both houses."""
    return [path for folder in EXAMPLES for path in folder.glob("[a-z]*.py")]


def main() -> None:
    """Write all tables and scripts of all pages."""
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text()
        if (new := rewritten(text)) != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
