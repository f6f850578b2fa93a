"""Tables of losses after training with every method, from final_loss*.json and
real_lm_training.json.
"""

from statistics import fmean
from typing import Any

from benchmarks.real_lm.losses import by_method, final
from benchmarks.real_lm.policies import FROM_TWO, POLICIES
from docs.scripts.result_files import exponent, markdown, mean, results_of

_HEADER = ["method", "bits", "evaluation loss", "against exact"]


def final_losses() -> str:
    """Write the evaluation loss after training with every method: final_loss.json."""
    rows = sorted(results_of("final_loss"), key=lambda row: mean(row["off"]))
    return markdown(_HEADER, [_cells(row) for row in rows])


def muon_losses() -> str:
    """Write the losses with Muon beside those with AdamW: final_loss_muon.json."""
    adamw = {row["method"]: mean(row["off"]) for row in results_of("final_loss")}
    rows = [[*_cells(row), f"{adamw[row['method']]:+.2%}"] for row in results_of("final_loss_muon")]
    return markdown([*_HEADER, "against exact, AdamW"], rows)


def _cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of `_HEADER` for a method."""
    return [
        f"`{row['method']}`",
        f"{row['bits']:.2f}",
        f"{mean(row['losses']):.4f}",
        f"{mean(row['off']):+.2%}",
    ]


def real_lm_training() -> str:
    """Write losses of fine-tuning with every method."""
    return _fine_tuning("real_lm_training")


def real_lm_training_muon() -> str:
    """Write losses of fine-tuning with Muon."""
    return _fine_tuning("real_lm_training_muon")


def real_lm_distance() -> str:
    """Write how far fine-tuning ends from the exact run, as a mean over seeds."""
    rows = results_of("real_lm_distance")
    exact = {row["seed"]: row for row in rows if row["method"] == "exact"}
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["method"], []).append(row)

    def cells(method: str) -> list[str]:
        of_seeds = sorted(runs[method], key=lambda row: row["seed"])
        losses = [f"{final(row) / final(exact[row['seed']]) - 1:+.3%}" for row in of_seeds]
        rare = fmean(row["rare"] / exact[row["seed"]]["rare"] for row in of_seeds)
        distances = [
            f"{fmean(row['distance'][kind] for row in of_seeds):.3f}"
            for kind in ("all", "embedding", "mlp")
        ]
        error = fmean(row["error"] for row in of_seeds)
        return [_named(method), exponent(error), ", ".join(losses), f"{rare - 1:+.3%}", *distances]

    def order(method: str) -> tuple[Any, ...]:
        return method in FROM_TWO, -runs[method][0]["bytes"]

    header = ["method", "estimated vNMSE", "loss, by seed", "of rare tokens"]
    table = [cells(method) for method in sorted(runs.keys() - {"exact"}, key=order)]
    return markdown([*header, "distance", "embedding", "MLP"], table)


def _named(method: str) -> str:
    return method if method in {*POLICIES, *FROM_TWO} else f"`{method}`"


def _fine_tuning(name: str) -> str:
    rows = []
    for mean_of in sorted(by_method(results_of(name)), key=lambda of: -of["bytes"]):
        if "exponent" in mean_of["method"]:
            continue
        is_exact = mean_of["method"] == "exact"
        rows.append(
            [
                _named(mean_of["method"]),
                f"{mean_of['loss']:.4f}",
                "" if is_exact or mean_of["off"] is None else f"{mean_of['off']:+.3%}",
                "" if is_exact else ", ".join(f"{off:+.3%}" for off in mean_of["each"]),
                "" if is_exact else exponent(mean_of["error"]),
                f"{mean_of['bytes'] / 1e6:,.0f} MB",
            ]
        )
    header = ["method", "held-out loss, seed 0", "against exact", "of each seed"]
    return markdown([*header, "estimated vNMSE", "bytes a step"], rows)


def real_lm_time_to_accuracy() -> str:
    """Write times of fine-tuning to the exact run's target, by link, with the gain over BF16."""
    rows = results_of("real_lm_time_to_accuracy")["rows"]
    rates = sorted({row["rate"] for row in rows})
    seconds = {(row["method"], row["rate"]): row["seconds_to_target"] for row in rows}
    table = []
    slowest = [row for row in rows if row["rate"] == rates[0]]
    slowest.sort(key=lambda row: -(row["seconds_to_target"] or 0.0))
    for method in (row["method"] for row in slowest):
        if "exponent" in method:
            continue
        cells = []
        for rate in rates:
            own, of_bf16 = seconds[method, rate], seconds["bf16", rate]
            reached = own is not None
            cells.append(f"{own:,.0f} s ({of_bf16 / own:.2f}x)" if reached else "not reached")
        table.append([f"`{method}`", *cells])
    return markdown(["method", *(f"{rate / 1e6:,.0f} Mbit/s" for rate in rates)], table)


ALL = (
    final_losses,
    muon_losses,
    real_lm_training,
    real_lm_training_muon,
    real_lm_distance,
    real_lm_time_to_accuracy,
)
