"""Tables of measurements on a real language model, from real_lm_*.json."""

from typing import Any

from benchmarks.real_lm.losses import by_method
from benchmarks.real_lm.policies import POLICIES
from docs.scripts.result_files import exponent, markdown, results_of

# Settings of the tables. Rows of older files name no model: they are of this one.
_SETTINGS = {"model": "smollm2", "batch": 2, "context": 256}
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
    header = ["method", "bits", *(_name(case) for case in _cases()), *_KINDS]
    return markdown(header, rows)


def real_lm_topologies() -> str:
    """Write errors of 5 bits beside those of other methods, by workers and topology."""
    keys = ("text", "workers", "topology", "bucketing")
    groups = dict.fromkeys(tuple(row[key] for key in keys) for row in _rows() if row["step"] == 0)
    rows = []
    for text, workers, topology, bucketing in groups:
        chosen = {"workers": workers, "topology": topology}
        ours = _errors(method="dynamiq:5", bucketing=bucketing, **chosen).get((text, 0))
        if ours is None:
            continue
        # Errors of methods without variable widths do not depend on the buckets.
        others = [_errors(method=m, **chosen).get((text, 0)) for m in ("mxfp8", "blockint:5")]
        ratios = ["" if o is None else f"{ours['vnmse'] / o['vnmse']:.2f}" for o in others]
        default = "striped" if topology == "ring" else "in order"
        buckets = default if bucketing == "auto" else bucketing.replace("_", " ")
        rows.append([text, str(workers), topology, buckets, exponent(ours["vnmse"]), *ratios])
    header = ["text", "workers", "topology", "buckets", "`dynamiq:5`"]
    return markdown([*header, "over `mxfp8`", "over `blockint:5`"], rows)


def real_lm_layers() -> str:
    """Write errors of some layers, by method: chats, step 0, a ring of 8 workers."""
    layers = ("0", "5", "10", "15", "20", "25", "29")
    rows = []
    for method in ("dynamiq:5", "mxfp8", "blockint:5"):
        own = _errors(method=method, workers=8, topology="ring", bucketing="auto")["chats", 0]
        rows.append([f"`{method}`", *(exponent(own["of_layer"][layer]) for layer in layers)])
    return markdown(["method", *(f"layer {layer}" for layer in layers)], rows)


def real_lm_training() -> str:
    """Write losses of fine-tuning with every method."""
    rows = []
    for mean in by_method(results_of("real_lm_training")):
        is_exact = mean["method"] == "exact"
        rows.append(
            [
                mean["method"] if mean["method"] in POLICIES else f"`{mean['method']}`",
                str(mean["seeds"]),
                f"{mean['loss']:.4f}",
                "" if is_exact or mean["off"] is None else f"{mean['off']:+.2%}",
                "" if is_exact else exponent(mean["error"]),
                f"{mean['bytes'] / 1e6:,.0f} MB",
            ]
        )
    header = ["method", "seeds", "held-out loss", "against exact", "estimated vNMSE"]
    return markdown([*header, "bytes a step"], rows)


def _rows(**chosen: Any) -> list[dict[str, Any]]:
    wanted = _SETTINGS | chosen
    return [
        row
        for row in ({"model": "smollm2"} | row for row in results_of("real_lm_errors"))
        if all(row[key] == value for key, value in wanted.items())
    ]


def _methods(**chosen: Any) -> list[str]:
    """List the methods of a choice. Policies by kind of tensor are not among them."""
    methods = dict.fromkeys(row["method"] for row in _rows(**chosen))
    return [method for method in methods if method not in POLICIES]


def _cases() -> list[tuple[str, int]]:
    return sorted({(row["text"], row["step"]) for row in _rows()}, key=lambda case: case[::-1])


def _name(case: tuple[str, int]) -> str:
    text, step = case
    return f"{text}, step {step}"


def _errors(**chosen: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of a choice by text and step; seeds differ in the third digit."""
    return {(row["text"], row["step"]): row for row in _rows(seed=0, **chosen)}


ALL = (
    real_lm_errors,
    real_lm_layers,
    real_lm_topologies,
    real_lm_training,
)
