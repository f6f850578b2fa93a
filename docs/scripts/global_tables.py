"""Tables of global steps by `dq.compress`: forms, cost of the rewriting, and schedules."""

import collections
from typing import Any

from docs.scripts.result_files import exponent, markdown, results_of

_TARGETS = {"H200": "two hosts of 4 H200", "v5p": "two slices of 4 TPU v5p"}


def global_forms() -> str:
    """Write losses and bytes of all forms, by version of JAX and kind of axes."""
    cells: dict[str, dict[tuple[str, str], dict[str, Any]]] = collections.defaultdict(dict)
    for row in results_of("global_forms"):
        cells[row["form"]][row["jax"], row["kind"]] = row
    versions = sorted({version for of in cells.values() for version, _ in of})
    cases = [(version, kind) for version in versions for kind in ("automatic", "explicit")]
    rows = []
    for form, of in cells.items():
        first = next(of[case] for case in cases if case in of)
        surplus = [row["surplus"] / row["groups"] for row in of.values() if "surplus" in row]
        rows.append(
            [
                form.replace("_", " "),
                " x ".join(f"{name} {size}" for name, size in first["axes"].items()),
                *(exponent(of[case]["difference"]) if case in of else "" for case in cases),
                f"{first['bytes_before']:,.0f}",
                f"{first['bytes_after']:,.0f}",
                f"{max(surplus):.0f}" if surplus else "",
            ]
        )
    header = ["form", "mesh", *(f"{version}, {kind}" for version, kind in cases)]
    return markdown([*header, "bytes of `jax.jit`", "at 5 bits", "over `dq.pmean`"], rows)


def aot_global_step() -> str:
    """Write bytes over the slow axis, and the share under the backward pass."""
    rows = [
        [
            _TARGETS[row["target"]],
            f"`{row['form']}`",
            f"{row['slow_bytes'] / 1e6:.1f} MB",
            f"{row['fast_bytes'] / 1e6:.0f} MB",
            f"{row['share_under_backward']:.0%}",
        ]
        for row in results_of("aot_global_step")
    ]
    return markdown(["devices", "step", "slow axis", "fast axis", "under the backward pass"], rows)


ALL = (global_forms, aot_global_step)
