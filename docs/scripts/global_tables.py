"""Tables of global steps by `dq.compress`: forms, cost of the rewriting, and schedules."""

import collections
from typing import Any

from docs.scripts.result_files import exponent, markdown, results_of

_TARGETS = {"H200": "two hosts of 4 H200", "v5p": "two slices of 4 TPU v5p"}


def global_forms() -> str:
    """Write the largest difference of losses and the bytes of each form."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in results_of("global_forms"):  # by version of JAX and kind of axes
        found[row["form"]].append(row)
    rows = []
    for form, of in found.items():
        first = min(of, key=lambda row: (row["jax"], row["kind"]))
        difference = max(row["difference"] for row in of)
        axes = " x ".join(f"{name} {size}" for name, size in first["axes"].items())
        rows.append(
            [
                form.replace("_", " ") + ("" if axes == "data 4" else f" ({axes})"),
                exponent(difference) if difference else "0",
                f"{first['bytes_before']:,.0f}",
                f"{first['bytes_after']:,.0f}",
            ]
        )
    return markdown(["form", "difference", "bytes of `jax.jit`", "at 5 bits"], rows)


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
        if "0.2.0" not in row["form"]
    ]
    return markdown(["devices", "step", "slow axis", "fast axis", "under the backward pass"], rows)


def global_cost() -> str:
    """Write what exact sums by `dq.compress` cost, over the jitted step."""
    rows = [
        [
            row["name"],
            *(f"{row[f'{what}_ratio']:.2f}" for what in ("step", "donated", "memory", "trace")),
        ]
        for row in results_of("global_step")["paired"]
    ]
    return markdown(["step", "time", "memory, donated", "kept", "trace"], rows)


def global_compile() -> str:
    """Write the seconds in which a decoder of 300 arrays is traced, lowered and compiled."""
    rows = [
        [f"`{row['way']}`", *(f"{row[what]:.1f} s" for what in ("trace", "lower", "compile"))]
        for row in results_of("global_step")["compiled"]
    ]
    return markdown(["way", "trace", "lower", "compile"], rows)


ALL = (global_forms, global_cost, global_compile, aot_global_step)
