"""Tables of train steps of other packages, from compressed_steps.json."""

from collections.abc import Callable
from typing import Any

from docs.scripts.result_files import markdown, results_of

_AXES = {"batch", "data", "diloco"}  # of the workers


def maxtext() -> str:
    """Write losses and bytes of MaxText."""
    return _global_steps(lambda run: run.startswith("maxtext_"))


def tunix() -> str:
    """Write losses and bytes of tunix."""
    return _global_steps(lambda run: run.startswith("tunix_"))


def global_steps() -> str:
    """Write losses and bytes of one training of each package with a global step."""
    return _global_steps(_is_the_first)


def _is_the_first(run: str) -> bool:
    return run in ("maxtext_data", "tunix_all") or "_" not in run


def _global_steps(is_shown: Callable[[str], bool]) -> str:
    rows = []
    for row in _rows(is_global=True):
        if not is_shown(row["run"]):
            continue
        kinds = [row[kind] for kind in ("unwrapped", "exact", "compressed")]
        before, _, after = (_between_workers(kind) for kind in kinds)
        others = [sum(kind["bytes_sent"].values()) - _between_workers(kind) for kind in kinds]
        rows.append(
            [
                row["title"],
                _version(kinds[2]),
                *(f"{kind['losses'][-1]:.5g}" for kind in kinds),
                f"{before:,.0f}",
                f"{after:,.0f}",
                f"{kinds[2]['bytes_of_pmean']:,.0f}",
                f"{others[2] / others[0]:.3f}" if others[0] else "",
            ]
        )
    headings = "training", "version", "loss, as it is", "exact", "compressed", "bytes, as it is"
    return markdown([*headings, "compressed", "`dq.pmean`", "other axes"], rows)


def compressed_steps() -> str:
    """Write losses and bytes of steps with an axis of workers."""
    rows = []
    for row in _rows(is_global=False):
        unwrapped, compressed = row["unwrapped"], row["compressed"]
        before, after = compressed["bytes_before"], compressed["bytes_after"]
        rows.append(
            [
                row["title"],
                row["place"],
                *(f"{kind['losses'][-1]:.4g}" for kind in (unwrapped, compressed)),
                f"{compressed['sums_compressed']}, {sum(compressed['sums_exact'].values())} exact",
                f"{before:,.0f}",
                f"{after:,.0f}",
                f"{before / after:.1f}",
            ]
        )
    headings = "package", "place of the wrap", "loss, exact", "compressed", "sums compressed"
    headings += "bytes, exact", "compressed", "fewer"
    return markdown(list(headings), rows)


def exact_sums() -> str:
    """Write which sums of global steps stay exact, and why."""
    rows = []
    for row in _rows(is_global=True):
        if _is_the_first(row["run"]) or row["run"].startswith("tunix_"):
            compressed = row["compressed"]
            whys = (f"{count}: {why}" for why, count in compressed["sums_exact"].items())
            rows.append(
                [row["title"], row["place"], str(compressed["sums_compressed"]), "; ".join(whys)]
            )
    return markdown(["training", "place of the wrap", "compressed", "exact"], rows)


def _rows(*, is_global: bool) -> list[dict[str, Any]]:
    return [
        row
        for row in results_of("compressed_steps")
        if ("bytes_sent" in row["compressed"]) == is_global
    ]


def _version(measured: dict[str, Any]) -> str:
    """Return the version of the package of a training."""
    (version,) = (each for name, each in measured["versions"].items() if name != "jax")
    return str(version)


def _between_workers(measured: dict[str, Any]) -> float:
    """Return the bytes that each device sends over the axis of the workers, in the program."""
    sent = measured["bytes_sent"].items()
    return float(sum(count for axes, count in sent if _AXES & set(axes.split(", "))))


ALL = (maxtext, tunix, global_steps, compressed_steps, exact_sums)
