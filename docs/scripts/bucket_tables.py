"""Tables of the page on buckets: errors from a result file, and predicted times of a step."""

import math
from collections.abc import Iterable
from typing import Any

from docs.scripts.real_lm_tables import rows_of
from docs.scripts.result_files import exponent, markdown, results_of
from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._prediction.advice import predictions

_FORMS = {"striped": "striped", "in order": "in order", "allocated": "in order, `allocate_bits`"}
_LINKS = ("1gbit", "10gbit", "100gbit", "400gbit")
_BACKWARD = 2 / 3  # of the computation of a step


def buckets_errors() -> str:
    """Write the errors of several buckets over those of one bucket, at 5 bits."""
    rows = [
        [
            row["tree"].replace("SmolLM2", "shapes of SmolLM2"),
            str(row["workers"]),
            str(row["in order"]["buckets"]),
            exponent(row["joint"]["vnmse"]),
            *(f"{row[form]['vnmse'] / row['joint']['vnmse']:.2f}" for form in _FORMS),
        ]
        for row in _rows()
    ]
    header = ["gradients", "workers", "buckets", "vNMSE of one bucket", *_FORMS.values()]
    return markdown(header, rows)


def buckets_steps() -> str:
    """Write predicted times of a step by link: striped, and in order under the backward pass."""
    alike = bits_of_the_error_in_order()
    rows = []
    for link in _LINKS:
        question = Advise(link=link, size="7G", bits=(5.0, round(alike, 2))).question()
        by_call = {(o.bits, o.name.split(", ")[1]): o for o in predictions(question)}

        def step(bits: float, topology: str, share: float, by_call: Any = by_call) -> str:
            time = by_call[bits, topology].all_reduce
            hidden = min(_BACKWARD, share * time.wire)
            return f"{1 + time.total - hidden:.2f} s"

        rows.append(
            [
                link.replace("gbit", " Gbit/s"),
                step(5.0, "ring", 0.0),
                step(round(alike, 2), "ring", 0.0),
                step(5.0, "ring", _share("ring")),
                step(5.0, "ring", _share("ring:unroll=True")),
                step(5.0, "all_to_all", _share("all_to_all")),
            ]
        )
    header = [
        "link",
        "striped, 5 bits",
        f"striped, {alike:.1f} bits: the error of those in order",
        "in order, ring",
        "in order, unrolled ring",
        "in order, all-to-all",
    ]
    return markdown(header, rows)


def bits_of_the_error_in_order() -> float:
    """Return the bits with which stripes have the error of buckets in order at 5 bits: of
    gradients of SmolLM2, on an all-to-all of 8 workers.
    """
    in_order, striped = (
        {row["method"]: row["vnmse"] for row in rows_of("all_to_all", bucketing)}
        for bucketing in ("auto", "striped")
    )
    of_a_bit = in_order["dynamiq:4"] / in_order["dynamiq:5"]
    return 5 - math.log(in_order["dynamiq:5"] / striped["dynamiq:5"], of_a_bit)


def _rows() -> Iterable[dict[str, Any]]:
    return [row for row in results_of("research/shared_budget") if row["bits"] == 5]


def _share(topology: str) -> float:
    """Return the share of the bytes under the backward pass, with a bucket for each layer."""
    return next(
        row["share_of_bytes_under_matmul"]
        for row in results_of("aot_h200")["steps"]
        if (row["topology"], row["matrices_per_bucket"]) == (topology, 4)
    )
