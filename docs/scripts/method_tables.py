"""Tables of the pages of single methods; see `docs.scripts.tables`."""

from docs.scripts.result_files import exponent, markdown, mean, results_of
from dynamiq_jax._console.units import format_rate, format_seconds


def entropy_coded() -> str:
    """Write the bits of THC's sums and of messages that hold them: entropy.json."""
    rows = []
    for row in results_of("research/entropy")["sums"]:
        if row["workers"] == 16:  # between the others
            continue
        messages = {}
        for topology in ("ring", "all_to_all"):
            fits = [
                each
                for each in row["coded"]
                if (each["topology"], each["coder"]) == (topology, "rans") and not each["coarse"]
            ]
            least = min(fits, key=lambda each: each["bits"])
            messages[topology] = f"{least['bits']:.2f} ({least['agreement']:g})"
        gathered, scattered = row["entropy"][-1], row["entropy_scattered"]
        rows.append(
            [
                row["gradients"],
                str(row["workers"]),
                f"{abs(round(row['agreement'], 2)):.2f}",
                str(row["wire_bits"]),
                f"{(gathered + scattered) / 2:.2f}",
                f"{(row['entropy'][0] + gathered) / 2:.2f}",
                *messages.values(),
            ]
        )
    header = ["gradients", "workers", "in common", "THC", "entropy: ring", "all to all"]
    return markdown([*header, "`EntropyCoded`: ring", "all to all"], rows)


def entropy_network() -> str:
    """Write times of all-reduces of emulated hosts: entropy_network.json."""
    found = results_of("entropy_network")
    rates = sorted({row["rate"] for row in found})
    rows = []
    for setting in dict.fromkeys(row["setting"] for row in found):
        of_rates = {row["rate"]: row for row in found if row["setting"] == setting}
        first = of_rates[rates[0]]
        times = (format_seconds(of_rates[rate]["seconds"]) for rate in rates)
        sent = f"{first['bytes_per_worker'] / 1e6:.2f} MB"
        rows.append([f"`{setting}`", sent, format_seconds(first["local_seconds"]), *times])
    header = ["setting", "sent by each host", "unlimited link", *map(format_rate, rates)]
    return markdown(header, rows)


def entropy_of_codes() -> str:
    """Write the bits that entropy coding would save other methods: entropy.json."""
    codes = [
        row for row in results_of("research/entropy")["codes"] if row["values"] == "one worker"
    ]
    rows = [
        [row["gradients"], *(f"{saved:.2f}" for saved in row["saved"].values())] for row in codes
    ]
    return markdown(["gradients", *(f"`{name}`" for name in codes[0]["saved"])], rows)


def split_sketch() -> str:
    """Write the error of sketches and memories at equal bytes: split_sketch.json."""
    names = {
        "second round": "count sketch, and a second round for exact values",
        "sketch alone": "count sketch alone, `hot=0`",
        "memory alone": "memory alone, `hot=1`",
        "hot 15/16": "`SplitSketch`, `hot=15/16`",
        "hot 3/4": "`SplitSketch`, `hot=3/4`",
        "TopKChunked": "`TopKChunked`",
        "oracle": "the largest coordinates, indices for free",
    }
    found = results_of("research/split_sketch")
    errors = {(row["name"], row["bits"]): row["vnmse"] for row in found}
    budgets = sorted({row["bits"] for row in found})
    rows = [
        [text, *(f"{errors[name, bits]:.2f}" for bits in budgets)] for name, text in names.items()
    ]
    header = [f"{bits:g} bit" + ("s" if bits > 1 else "") for bits in budgets]
    return markdown(["sent", *header], rows)


def arc_synthetic() -> str:
    """Write distances from the optimum after the last step: arc_synthetic.json."""
    last = {
        (row["method"], row["wrapper"]): row["last"] for row in results_of("research/arc_synthetic")
    }
    rows = [
        [name, *(exponent(last[name, wrapper]) for wrapper in ("EF21M", "ErrorFeedback"))]
        for name in dict.fromkeys(name for name, _ in last)
    ]
    return markdown(["method", "inside `EF21M`", "inside `ErrorFeedback`"], rows)


def locality() -> str:
    """Write errors of top-k of blocks, in order and permuted, mean of the steps: locality.json."""
    found = results_of("research/locality")
    rows = []
    for bits in dict.fromkeys(row["bits"] for row in found):
        of_both = [row for row in found if (row["bits"], row["block_size"]) == (bits, 256)]
        errors = (
            f"{mean([row[name] for row in of_both]):.2f}"
            for name in ("in_order", "permuted", "coordinates")
        )
        rows.append([f"{bits:g}", *errors])
    return markdown(["bits", "in order", "permuted", "as many single coordinates"], rows)


def slow_link() -> str:
    """Write times to the target below 3 bits: time_to_accuracy_low_bits.json."""
    found = results_of("time_to_accuracy_low_bits")
    offs = {row["setting"]: row["mean_off"] for row in found["final_losses"]}
    rows = []
    for row in found["links"]:
        targets = []
        for fraction in ("0.99", "0.995"):
            seconds = row["to_target"][fraction]["seconds"]
            targets.append("not reached" if seconds is None else format_seconds(seconds))
        rows.append(
            [
                f"`{row['setting']}`",
                f"{row['bits']:.2f}",
                format_seconds(row["step_seconds"]),
                *targets,
                f"{offs[row['setting']]:+.2%}",
            ]
        )
    header = ["setting", "bits", "a step", "99% target", "99.5% target", "final loss"]
    return markdown(header, rows)


ALL = (
    entropy_coded,
    entropy_network,
    entropy_of_codes,
    split_sketch,
    arc_synthetic,
    locality,
    slow_link,
)
