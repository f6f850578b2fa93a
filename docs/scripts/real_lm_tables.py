"""Tables of errors on a real language model, from real_lm_errors.json."""

from typing import Any

from benchmarks.real_lm.errors import ALLOCATED
from benchmarks.real_lm.losses import by_method
from benchmarks.real_lm.policies import POLICIES
from docs.scripts.result_files import exponent, markdown, results_of

# Settings of the tables. Rows of older files name no model: they are of this one.
_SETTINGS = {"model": "smollm2", "batch": 2, "context": 256}
_LATER = "smollm2-seed-1"  # trained for 150 steps with other batches
_KINDS = ("embedding", "attention", "mlp")


def real_lm_errors() -> str:
    """Write errors of whole gradients on a ring of 8 workers, by method."""
    rows = []
    on_a_ring = {"workers": 8, "topology": "ring", "bucketing": "auto"}
    for method in _methods(**on_a_ring):
        own = _errors(method=method, **on_a_ring)
        bits = next(iter(own.values()))["bits"]
        cells = [exponent(own[case]["vnmse"]) if case in own else "" for case in _cases()]
        start = own.get(("chats", 0))
        kinds = ["" if start is None else exponent(start["of_kind"][kind]) for kind in _KINDS]
        rows.append([f"`{method}`", f"{bits:.2f}", *cells, *kinds])
    rows.sort(key=lambda row: -float(row[1]))
    header = ["method", "bits", *(f"step {step}" for _, step in _cases()), *_KINDS]
    return markdown(header, rows)


def real_lm_topologies() -> str:
    """Write errors of 5 bits beside those of other methods, by topology and buckets: chats."""
    rows, order = [], ["ring", "butterfly", "all_to_all"]
    measured = [*_rows(step=0, seed=0), *_rows(model=_LATER, seed=0)]
    measured.sort(key=lambda row: (row["step"], order.index(row["topology"])))
    for row in measured:
        is_ours = row["method"].removeprefix(ALLOCATED) == "dynamiq:5"
        if not is_ours or (row["text"], row["workers"]) != ("chats", 8):
            continue
        gradient = {key: row[key] for key in ("model", "step", "text", "workers")}
        ratios = []
        for method in ("mxfp8", "blockint:5"):
            # Errors of methods without variable widths do not depend on the buckets.
            found = _rows(method=method, seed=0, topology=row["topology"], **gradient)
            ratios.append(f"{row['vnmse'] / found[0]['vnmse']:.2f}" if found else "")
        default = "striped" if row["topology"] == "ring" else "in order"
        buckets = default if row["bucketing"] == "auto" else row["bucketing"].replace("_", " ")
        if row["method"].startswith(ALLOCATED):
            buckets += ", `allocate_bits`"
        step = str(row["step"])
        rows.append([step, row["topology"], buckets, exponent(row["vnmse"]), *ratios])
    header = ["step", "topology", "buckets", "`dynamiq:5`"]
    return markdown([*header, "over `mxfp8`", "over `blockint:5`"], rows)


def real_lm_policies() -> str:
    """Write errors of bits by kind of tensor in about the bytes of 5 bits for all."""
    rows = []
    for method in ("dynamiq:5", *POLICIES):
        own = _errors(method=method, workers=8, topology="ring", bucketing="auto")
        of_text = [own[text, 0] for text in ("chats", "plain")]
        name = method if method in POLICIES else f"`{method}`"
        rows.append([name, *(exponent(row["vnmse"]) for row in of_text)])
    return markdown(["bits", "chats", "plain"], rows)


def changed_numbers() -> str:
    """Write what a method changes: bytes, error of the mean, and final loss."""
    errors = {row["method"]: row for row in rows_of("ring", "auto")}
    losses = {row["method"]: row["each"] for row in by_method(results_of("real_lm_training"))}
    rows = []
    for method in ("bf16", "mxfp8", "dynamiq:5", "dynamiq:4", "dynamiq:3"):
        off = losses[method]
        span = dict.fromkeys(f"{each:+.3%}" for each in (min(off), max(off)))
        own = errors[method]
        cells = f"{own['bits']:.2f}", f"{100 * own['vnmse']:.2g}%", " to ".join(span)
        rows.append([f"`{method}`", *cells])
    return markdown(["method", "bits", "squared error of a mean", "final loss"], rows)


def rows_of(
    topology: str, bucketing: str, text: str = "chats", step: int = 0, workers: int = 8
) -> list[dict[str, Any]]:
    """Return the rows of all methods; rounding seeds differ in the fourth digit."""
    case = {"topology": topology, "bucketing": bucketing, "text": text, "step": step}
    return _rows(workers=workers, seed=0, **case)


def _rows(**chosen: Any) -> list[dict[str, Any]]:
    wanted = _SETTINGS | chosen
    return [
        row
        for row in ({"model": "smollm2"} | row for row in results_of("real_lm_errors"))
        if all(row[key] == value for key, value in wanted.items())
    ]


def _methods(**chosen: Any) -> list[str]:
    """List the methods of a choice, without policies by kind of tensor and other exponents."""
    methods = dict.fromkeys(row["method"] for row in _rows(**chosen))
    return [name for name in methods if name not in POLICIES and "exponent" not in name]


def _cases() -> list[tuple[str, int]]:
    return [("chats", step) for step in sorted({row["step"] for row in _rows()})]


def _errors(**chosen: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of a choice by text and step."""
    return {(row["text"], row["step"]): row for row in _rows(seed=0, **chosen)}


ALL = (changed_numbers, real_lm_errors, real_lm_policies, real_lm_topologies)
