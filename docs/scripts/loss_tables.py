"""Tables of losses after training with every method, from final_loss*.json and
real_lm_training.json.
"""

from statistics import fmean
from typing import Any

from docs.scripts.result_files import exponent, markdown, mean, results_of


def final_losses() -> str:
    """Write the evaluation loss after training with every method: final_loss.json."""
    results = results_of("final_loss")
    rows = [
        [
            f"`{row['method']}`",
            f"{row['bits']:.2f}",
            f"{mean(row['losses']):.4f}",
            f"{mean(row['off']):+.2%}",
            ", ".join(f"{off:+.2%}" for off in row["off"]),
        ]
        for row in results
    ]
    return markdown(["method", "bits", "evaluation loss", "against exact", "of each seed"], rows)


def muon_losses() -> str:
    """Write the losses with Muon beside those with AdamW: final_loss_muon.json."""
    adamw = {row["method"]: mean(row["off"]) for row in results_of("final_loss")}
    rows = [
        [
            f"`{row['method']}`",
            f"{row['bits']:.2f}",
            f"{mean(row['losses']):.4f}",
            f"{mean(row['off']):+.2%}",
            ", ".join(f"{off:+.2%}" for off in row["off"]),
            f"{adamw[row['method']]:+.2%}",
        ]
        for row in results_of("final_loss_muon")
    ]
    header = ["method", "bits", "evaluation loss", "against exact", "of each seed"]
    return markdown([*header, "against exact, AdamW"], rows)


def real_lm_training() -> str:
    """Write losses of fine-tuning with every method."""
    found = results_of("real_lm_training")
    exact = {row["seed"]: _final(row) for row in found if row["method"] == "exact"}
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = [row for row in found if row["method"] == method]
        off = [_final(row) / exact[row["seed"]] - 1 for row in own if row["seed"] in exact]
        rows.append(
            [
                f"`{method}`",
                str(len(own)),
                f"{fmean(map(_final, own)):.4f}",
                f"{fmean(off):+.3%}" if off and method != "exact" else "",
                exponent(fmean(row["error"] for row in own)) if method != "exact" else "",
                f"{own[0]['bytes'] / 1e6:,.0f} MB",
            ]
        )
    header = ["method", "seeds", "held-out loss", "against exact", "estimated vNMSE"]
    return markdown([*header, "bytes a step"], rows)


def _final(row: dict[str, Any]) -> float:
    return list(row["held_out"].values())[-1]


ALL = (
    final_losses,
    muon_losses,
    real_lm_training,
)
