"""Tables of train steps of other packages, from compressed_steps.json."""

from typing import Any

from docs.scripts.result_files import markdown, results_of

_AXES = {"batch", "data", "diloco"}  # of the workers


def global_steps() -> str:
    """Write losses and bytes of trainings with a global step."""
    rows = []
    for row in _rows(is_global=True):
        kinds = [row[kind] for kind in ("unwrapped", "exact", "compressed")]
        before, _, after = (_between_workers(kind) for kind in kinds)
        rows.append(
            [
                row["title"],
                _version(kinds[2]),
                row["place"],
                *(f"{kind['losses'][-1]:.5g}" for kind in kinds),
                f"{before:,.0f}",
                f"{after:,.0f}",
            ]
        )
    headings = "training", "version", "place of the wrap", "loss, as it is", "exact", "compressed"
    return markdown([*headings, "bytes, as it is", "compressed"], rows)


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
                f"{before:,.0f}",
                f"{after:,.0f}",
                f"{before / after:.1f}",
            ]
        )
    headings = "package", "place of the wrap", "loss, exact", "compressed"
    headings += "bytes, exact", "compressed", "fewer"
    return markdown(list(headings), rows)


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


ALL = (global_steps, compressed_steps)
