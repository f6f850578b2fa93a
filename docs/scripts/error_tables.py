"""Tables of errors of one all-reduce: by method, beside the paper's, beside bounds."""

from statistics import stdev
from typing import Any

from docs.scripts.result_files import exponent, markdown, mean, results_of


def real_lm_methods() -> str:
    """Write the error of every method on a tenth of a real model: compare_real_lm.json."""
    rows = [
        [
            f"`{row['method']}`",
            f"{row['bits']:.2f}",
            exponent(row["vnmse"]),
            exponent(row["relative"]),
            f"{row['steps']['']['gain']:.3f}",
        ]
        for row in sorted(results_of("compare_real_lm"), key=lambda row: -row["bits"])
        if row["method"] not in ("dynamiq:8.5", "dynamiq:7.5", "blockint:7", "blockint:6")
    ]
    return markdown(["method", "bits", "vNMSE", "of a super-group", "gain"], rows)


def equal_bits() -> str:
    """Write the error of DynamiQ and of block integers of as many bits, on 8 workers:
    compare_ring.json and compare_topologies.json.
    """
    vnmse = {
        row["setting"]: row["vnmse"]
        for name in ("compare_ring", "compare_topologies")
        for row in results_of(name)
        if row["workers"] == 8
    }
    carriers = ("ring", "butterfly", "all_to_all")
    rows = []
    for bits in (3.5, 4.5, 5.5, 8.5):
        settings = (f"dynamiq:{bits:g}", f"blockint:{bits - 0.5:g}")
        errors = [vnmse[f"{setting}:{carrier}"] for setting in settings for carrier in carriers]
        rows.append([f"{bits:g}", *map(exponent, errors)])
    header = ["bits", "`DynamiQ`: ring", "butterfly", "all_to_all"]
    return markdown([*header, "`BlockInt(block=32)`: ring", "butterfly", "all_to_all"], rows)


def beside_paper() -> str:
    """Write the ratios of errors in tables 3 to 6 of the paper: paper_tables_real_lm.json and
    paper_tables.json.
    """
    real = {_case(row): row for row in results_of("paper_tables_real_lm")}
    rows, base = [], {}
    for row in results_of("paper_tables"):
        table, paper = row["table"].split(":")[0], row["paper"]
        if not table.startswith("Table"):
            continue
        if paper:
            base.setdefault(table, row)  # The first row that both have is 1.
        rows.append((table, row))
    cells = [
        [
            table,
            row["row"],
            f"{real[_case(row)]['mean'] / real[_case(base[table])]['mean']:.2g}",
            f"{row['mean'] / base[table]['mean']:.2g}",
            f"{row['paper'] / base[table]['paper']:.2g}" if row["paper"] else "",
        ]
        for table, row in rows
    ]
    return markdown(["", "row", "SmolLM2", "small model", "paper"], cells)


def _case(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["table"], row["row"], row["workers"]


def by_workers() -> str:
    """Write errors on a ring of more and more workers: paper_tables_real_lm.json and
    paper_tables.json.
    """
    names = {"default": "`DynamiQ`", "MXFP8": "MXFP8"}
    errors: dict[tuple[str, str], dict[int, float]] = {}
    for row in (*results_of("paper_tables_real_lm"), *results_of("paper_tables")):
        if row["table"].startswith("Workers"):
            name = names.get(row["row"].partition(", n")[0])  # None for the paper's preset
            if name is None:
                continue
            parts = ("embedding", "layer 15")
            real = {f"SmolLM2, {part}": row["vnmse"].get(part) for part in parts}
            models = {"small model": row["mean"]} if "step 20" in row["vnmse"] else real
            for model, error in models.items():
                errors.setdefault((model, name), {})[row["workers"]] = error
    counts = sorted({workers for of in errors.values() for workers in of})
    rows = [
        [model, name, *(exponent(of[workers]) if workers in of else "" for workers in counts)]
        for name in names.values()
        for (model, of_name), of in errors.items()
        if of_name == name
    ]
    return markdown(["model", "vNMSE on a ring", *(f"n = {n}" for n in counts)], rows)


def allocation() -> str:
    """Write the ranges of the ratios of DynamiQ on each of many tensors: allocation_real_lm.json
    and allocation.json.
    """
    columns = {
        "to `BlockInt`, both unbiased": ("against_blockint", "unbiased"),
        "`DynamiQ` unbiased, `BlockInt` to nearest": ("against_blockint", "unbiased / nearest"),
        "4.25 bits to MXFP4": ("against_mxfp4", "to mxfp4", 4.25),
        "5 bits to MXFP4": ("against_mxfp4", "to mxfp4", 5),
    }
    files = [results_of(name) for name in ("allocation_real_lm", "allocation")]
    compared = {
        table: [row for file in files for row in file[table]]
        for table in ("against_blockint", "against_mxfp4")
    }
    rows = []
    for tensor in dict.fromkeys(_name(row) for row in compared["against_blockint"]):
        cells = [tensor]
        for table, kind, *bits in columns.values():
            ratios = [
                row["ratios"][kind]
                for row in compared[table]
                if _name(row) == tensor and (not bits or row["bits"] == bits[0])
            ]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "")
        rows.append(cells)
    return markdown(["tensor", *columns], rows)


def _name(row: dict[str, Any]) -> str:
    """Return the name of a tensor without its training step."""
    return row["tensor"].rstrip(" 0123456789")


def limits() -> str:
    """Write the least errors of any code beside measured ones, on the same gradients:
    rate_distortion*.json, paper_tables_real_lm.json and compare_ring.json.
    """
    measured = {
        (row["setting"], row["workers"], step): of["vnmse"]
        for row in results_of("compare_ring")
        for step, of in row["steps"].items()
    }
    for row in results_of("paper_tables_real_lm"):
        measured[row["setting"], row["workers"], ""] = row["vnmse"]["layer 15"]
    rows = []
    for bound in (*results_of("rate_distortion_real_lm"), *results_of("rate_distortion")):
        step, workers, bits = bound["step"], bound["workers"], bound["bits"]
        settings = (f"dynamiq:{bits:g}:ring", "mxfp8:ring")
        errors = [measured.get((setting, workers, step)) for setting in settings]
        is_shown = step in ("", "step 100") and bits in (4, 5) and workers == 8
        if is_shown and None not in errors:
            model = f"small model, {step}" if step else "SmolLM2, layer 15"
            cells = map(exponent, (bound["message"], bound["ring"], *errors))
            rows.append([f"{bits:g}", model, *cells])
    rows.sort(key=lambda row: row[0])
    header = ["bits", "gradients", "least, gathered message alone", "least, ring"]
    return markdown([*header, "`DynamiQ`", "`MXFP8`, 8.25 bits"], rows)


def error_estimates() -> str:
    """Write the range of the ratios of estimated and true errors: real_lm_estimates.json and
    error_estimate.json.
    """
    rows = [*results_of("real_lm_estimates"), *results_of("error_estimate")["precision"]]
    means, stds = zip(*((mean(r["ratios"]), stdev(r["ratios"])) for r in rows), strict=True)
    kinds = {row["kind"] for row in rows}
    return (
        f"On {len(kinds)} kinds of tensors of about two million coordinates, the estimate for "
        f"DynamiQ was {min(means):.2f} to {max(means):.2f} times the true error, as the mean of "
        "ten samples, at 4 to 6 bits and with 2 to 16 workers (`python -m "
        "benchmarks.error.estimate`). The standard deviation of one sample was at most "
        f"{max(stds):.0%}. It falls with the square root of the coordinates.\n"
    )


def rounding_bias() -> str:
    """Write the share of the squared error that is bias, over topologies: rounding_bias.json."""
    found = results_of("rounding_bias")
    counts = list(dict.fromkeys(row["workers"] for row in found))
    rows = []
    for kind in ("synthetic", "small model"):
        own = [row for row in found if row["gradients"].startswith(kind)]
        cells = [kind]
        for count in counts:
            shares = [100 * row["bias"] for row in own if row["workers"] == count]
            cells.append(f"{min(shares):.1f} to {max(shares):.1f}%")
        gains = [row["gain"] for row in own]
        rows.append([*cells, f"{min(gains):.2f} to {max(gains):.2f}"])
    header = ["gradients", *(f"{count} workers" for count in counts)]
    return markdown([*header, "error of independent rounding"], rows)


def drift_feedback() -> str:
    """Write the drift of a mean over rounds, plain and in error feedback: drift.json."""
    found = [row for row in results_of("drift") if row["kind"] == "all-reduce"]
    columns = [
        (measure, topology)
        for measure in ("drift", "distance")
        for topology in ("ring", "all_to_all")
    ]
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        cells = []
        for measure, topology in columns:
            of = [row for row in found if (row["method"], row["topology"]) == (method, topology)]
            plain, feedback = (
                f"{_rounded(100 * mean([row[name] for row in of])):.1f}"
                for name in (measure, f"{measure}_ef")
            )
            cells.append(f"{plain}, {feedback}")
        rows.append([f"`{method}`", *cells])
    return markdown(["%", *(f"{measure}, `{name}`" for measure, name in columns)], rows)


def drift_messages() -> str:
    """Write the drift of a sum of messages, and the error of one: drift.json."""
    found = [row for row in results_of("drift") if row["kind"] == "message"]
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        if method.startswith(("dynamiq:3", "dynamiq:5", "dynamiq:6")):
            continue
        of = [row for row in found if row["method"] == method]
        drift = ", ".join(f"{_rounded(100 * row['drift']):.1f}%" for row in of)
        errors = ", ".join(exponent(row["vnmse"]) for row in of)
        rows.append([f"`{method}`", drift, errors])
    return markdown(["method", "drift after 60 messages", "vNMSE of one"], rows)


def _rounded(value: float) -> float:
    """Return one digit behind the point, and no zero with a sign."""
    return round(value, 1) + 0.0


ALL = (
    drift_feedback,
    drift_messages,
    real_lm_methods,
    equal_bits,
    beside_paper,
    by_workers,
    allocation,
    limits,
    rounding_bias,
    error_estimates,
)
