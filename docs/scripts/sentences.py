"""Sentences of pages whose numbers come from result files."""

from docs.scripts.real_lm_tables import rows_of
from docs.scripts.result_files import results_of


def opening() -> str:
    """Write the gain in time to accuracy over BF16 on slow links and on the fastest one."""
    links = results_of("time_to_accuracy")["links"]
    seconds = {(r["setting"], r["rate"]): r["to_target"]["0.99"]["seconds"] for r in links}
    *slow, fastest = sorted({rate for _, rate in seconds})
    spans = [
        [
            seconds["bf16:ring", rate] / seconds[setting, rate]
            for setting in ("dynamiq:4:ring", "dynamiq:5:ring")
            for rate in rates
        ]
        for rates in (slow, [fastest])
    ]
    ends = [dict.fromkeys(f"{end(span):.1f}" for end in (min, max)) for span in spans]
    gains = [f"{' to '.join(each)} times sooner" for each in ends]
    names = " and ".join(f"{rate / 1e6:g}" for rate in slow)
    return (
        f"DynamiQ at 4 and 5 bits gets to the loss of the exact run {gains[0]} than a BF16 ring on "
        f"links of {names} Mbit/s, and {gains[1]} on {fastest / 1e9:g} Gbit/s.\n"
    )


def real_error() -> str:
    """Write the error of 5 bits on a real model beside that of MXFP8, over texts and steps."""
    errors, ratios = [], []
    for text in ("chats", "plain"):
        for step in (0, 150):
            of = {row["method"]: row["vnmse"] for row in rows_of("ring", "auto", text, step)}
            errors.append(100 * of["dynamiq:5"])
            ratios.append(of["dynamiq:5"] / of["mxfp8"])
    return (
        "The squared error of a mean of its gradients over 8 workers is "
        f"{min(errors):.2f} to {max(errors):.2f}%, "
        f"{min(ratios):.2f} to {max(ratios):.2f} times that of MXFP8. By default, [small rows get "
        "more bits](docs/methods/dynamiq.md#widths), for 1.3 times this error.\n"
    )


ALL = (opening, real_error)
