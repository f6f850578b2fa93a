"""Tables of errors on a real language model, from real_lm_errors.json."""

from typing import Any

from docs.scripts.result_files import exponent, markdown, results_of

_KINDS = ("embedding", "attention", "mlp")


def real_lm_errors() -> str:
    """Write errors of whole gradients on a ring of 8 workers, by method."""
    rows = []
    for method in _methods(workers=8, topology="ring"):
        own = _errors(method=method, workers=8, topology="ring", bucketing="auto")
        chats = own["chats", 0]
        cells = [exponent(own[case]["vnmse"]) if case in own else "" for case in _cases()]
        kinds = [exponent(chats["of_kind"][kind]) for kind in _KINDS]
        rows.append([f"`{method}`", f"{chats['bits']:.2f}", *cells, *kinds])
    rows.sort(key=lambda row: -float(row[1]))
    header = ["method", "bits", *(_name(case) for case in _cases()), *_KINDS]
    return markdown(header, rows)


def real_lm_topologies() -> str:
    """Write errors of 5 bits beside those of other methods, by workers and topology."""
    keys = ("text", "workers", "topology", "bucketing")
    groups = {tuple(row[key] for key in keys): row for row in _rows() if row["step"] == 0}
    rows = []
    for text, workers, topology, bucketing in groups:
        chosen = {"workers": workers, "topology": topology}
        ours = _errors(method="dynamiq:5", bucketing=bucketing, **chosen).get((text, 0))
        if ours is None:
            continue
        # Errors of methods without variable widths do not depend on the buckets.
        others = (_errors(method=m, **chosen)[text, 0] for m in ("mxfp8", "blockint:5"))
        ratios = [f"{ours['vnmse'] / other['vnmse']:.2f}" for other in others]
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


def real_lm_energy() -> str:
    """Write the share of each kind of tensor in the energy of the mean gradient of 8 workers."""
    rows = []
    for text, step in _cases():
        shares = rows_of("ring", "auto", text, step)[0]["energy_of_kind"]
        rows.append([_name((text, step)), *(f"{shares[kind]:.0%}" for kind in (*_KINDS, "norm"))])
    return markdown(["gradient", *_KINDS, "scales of norms"], rows)


def rows_of(
    topology: str, bucketing: str, text: str = "chats", step: int = 0, workers: int = 8
) -> list[dict[str, Any]]:
    """Return the rows of all methods; rounding seeds differ in the fourth digit."""
    case = {"topology": topology, "bucketing": bucketing, "text": text, "step": step}
    case |= {"workers": workers, "seed": 0}
    return [row for row in _rows() if all(row[key] == value for key, value in case.items())]


def _rows() -> list[dict[str, Any]]:
    return list(results_of("real_lm_errors"))


def _methods(**chosen: Any) -> list[str]:
    fit = [row for row in _rows() if all(row[key] == value for key, value in chosen.items())]
    return list(dict.fromkeys(row["method"] for row in fit if row["text"] == "chats"))


def _cases() -> list[tuple[str, int]]:
    return sorted({(row["text"], row["step"]) for row in _rows()}, key=lambda case: case[::-1])


def _name(case: tuple[str, int]) -> str:
    text, step = case
    return f"{text}, step {step}"


def _errors(**chosen: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows of a choice by text and step."""
    fit = [row for row in _rows() if all(row[key] == value for key, value in chosen.items())]
    return {(row["text"], row["step"]): row for row in fit if row["seed"] == 0}


ALL = (
    real_lm_errors,
    real_lm_energy,
    real_lm_layers,
    real_lm_topologies,
)
