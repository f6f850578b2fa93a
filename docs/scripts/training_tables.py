"""Tables of the pages on workers that are far, slow or lossy."""

import itertools
import re
from collections.abc import Callable

from docs.scripts.result_files import exponent, markdown, mean, results_of
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate

_ISLAND_MESSAGES = (
    "exact",
    "4 bits",
    "0.5 bits",
    "0.25 bits",
    "published, 0.16 bits",
    "0.11 bits",
    "0.25 bits, no residual",
    "0.25 bits, Nesterov",
    "exact, beside local steps",
    "0.25 bits, beside local steps",
)


def local_sgd() -> str:
    """Write losses and bytes of local SGD: local_sgd.json."""
    rows = []
    for row in results_of("local_sgd"):
        final = mean([losses[-1] for losses in row["losses"]])
        rows.append(
            [
                row["run"],
                f"{final:.3f}",
                f"{mean(row['off_every_step']):+.2%}",
                f"{row['bytes_a_step'] / 1e3:,.0f} kB",
                f"{row['peak_bytes'] / 1e3:,.0f} kB",
            ]
        )
    header = ["run", "loss", "against BF16 in every step", "bytes a step", "largest step"]
    return markdown(header, rows)


def reference_dtype() -> str:
    """Write errors of local SGD by the dtype of its parameters: reference_dtype.json."""
    names = ("float32", "bfloat16", "bfloat16, reference in float32")
    rows = [
        [str(row["every"]), *(f"{row[name]:.1%}" for name in names)]
        for row in results_of("reference_dtype")
        if row["step"] == 0.003
    ]
    return markdown(["local steps", *names], rows)


def local_sgd_times() -> str:
    """Write times to the target on slow links: time_to_accuracy_local_sgd.json."""
    found = results_of("time_to_accuracy_local_sgd")
    rates = sorted({row["rate"] for row in found["links"]})
    rows = []
    for losses in found["final_losses"]:
        name = losses["setting"]
        links = {row["rate"]: row for row in found["links"] if row["setting"] == name}
        cells = [f"`{name}`", f"{links[rates[0]]['bits']:.2f}"]
        for rate in rates:
            seconds = links[rate]["to_target"]["0.99"]["seconds"]
            reached = "not reached" if seconds is None else format_seconds(seconds)
            cells += [format_seconds(links[rate]["step_seconds"]), reached]
        rows.append([*cells, f"{losses['mean_off']:+.2%}"])
    header = ["setting", "bits a step"]
    for rate in rates:
        header += [f"a step at {format_rate(rate)}", f"99% target at {format_rate(rate)}"]
    return markdown([*header, "final loss"], rows)


def moshpit_laws() -> str:
    """Write variances after rounds by the law, and how far simulations are off: moshpit.json."""
    rows = []
    for row in results_of("research/moshpit")["laws"]:
        pairs = list(zip(row["simulated"], row["law"], strict=True))[1:5]
        shown = [
            f"{exponent(law)} ({found / law - 1:+.1%})" if law else "0" for found, law in pairs
        ]
        rows.append([" x ".join(map(str, row["grid"])), f"{row['dead']:.0%}", *shown])
    rounds = [f"{number} rounds" if number > 1 else "1 round" for number in range(1, 5)]
    return markdown(["grid", "dead", *rounds], rows)


def moshpit_schemes() -> str:
    """Write the rounds that schemes take until a variance: moshpit.json."""
    rows = []
    for row in results_of("research/moshpit")["schemes"]:
        most = len(row["variance"]) - 1
        until = row["rounds_until"].values()
        rows.append([row["scheme"], *(f"more than {most}" if n is None else str(n) for n in until)])
    return markdown(["scheme", *("until 1e-2", "until 1e-4", "until 1e-9")], rows)


def moshpit_errors() -> str:
    """Write errors of lossy averages of parameters and of their changes: moshpit.json."""
    rows = [
        [f'`"{row["method"]}"`', f"{row['parameters']:.1%}", f"{row['changes']:.1%}"]
        for row in results_of("research/moshpit")["errors"]
    ]
    return markdown(["method", "average of parameters", "average of their changes"], rows)


def moshpit_training() -> str:
    """Write final losses with dead peers: moshpit.json."""
    rows = []
    for row in results_of("research/moshpit")["training"]:
        final = [losses[-1] for losses in row["losses"]]
        off = [mean(row["off"]), min(row["off"]), max(row["off"])]
        shown = "" if row["run"] == "no failures" else "{:+.2%} ({:+.2%} to {:+.2%})".format(*off)
        rows.append([row["group"], row["run"], f"{mean(final):.3f}", shown])
    return markdown(
        ["averages of", "run", "loss", "against no failures (range of three seeds)"], rows
    )


def drop_compute_simulated() -> str:
    """Write the simulated gain of a compute threshold, and its laws: drop_compute.json."""
    rows = [
        [
            row["noise"],
            str(row["workers"]),
            f"{row['held_out']['drop_rate']:.1%}",
            f"{row['held_out']['speedup']:.3f}x",
            f"{row['law']:.3f}x",
            f"{row['cut']['speedup']:.3f}x",
            f"{row['cut_law']:.3f}x",
        ]
        for row in results_of("research/drop_compute")["simulated"]
    ]
    header = ["latencies", "workers", "dropped", "**speed-up**", "by our law"]
    return markdown([*header, "if cut off (paper)", "by the paper's law"], rows)


def drop_compute_processes() -> str:
    """Write step times and losses of two processes, one of them late: drop_compute.json."""
    rows = [
        [
            str(row["seed"]),
            format_seconds(row["step_seconds_before"]),
            format_seconds(row["step_seconds"]),
            f"{row['drop_rate']:.1%}",
            f"{row['speedup']:.2f}x",
            f"{row['predicted_speedup']:.2f}x",
            f"{row['equal_seconds']:.0f} s",
            f"{row['loss_before']:.4f}",
            f"{row['loss']:.4f}",
        ]
        for row in results_of("research/drop_compute")["processes"]
    ]
    header = ["seed", "step, no threshold", "step, threshold", "dropped", "speed-up", "predicted"]
    return markdown([*header, "compared at", "loss, no threshold", "loss, threshold"], rows)


def packet_loss() -> str:
    """Write final losses over a channel that loses packets: packet_loss.json."""
    training = results_of("research/packet_loss")["training"]
    runs = [row for row in training if row["broadcast"] == "parameters" and row["decays"]]
    rows = []
    for row in runs:
        drift = [(max(seed["drift"]) / seed["mean_square"]) ** 0.5 for seed in row["seeds"]]
        offs = row["off"]
        rows.append(
            [
                row["gradients"],
                f"{row['rate']:.0%}",
                f"{row['burst'] or 1 / (1 - row['rate']):.1f}",
                f"{mean(offs):+.2%} ({min(offs):+.2%} to {max(offs):+.2%})",
                f"{mean(drift):.2%}",
            ]
        )
    headings = ["gradients", "lost", "mean burst", "final loss (range of the seeds)"]
    return markdown([*headings, "largest drift"], rows)


def messages_under_loss() -> str:
    """Write what lost packets take along with every kind of message: packet_loss.json."""
    rows = []
    for row in results_of("research/packet_loss")["messages"]:
        shares = [row[name] for name in ("lost", "lost_in_bursts", "lost_with_rows_together")]
        lost = ["all" if share is None else f"{share:.0%}" for share in shares]
        names = ("error", "error_under_loss", "error_with_rows_together")
        rows.append([f"`{row['method']}`", *lost, *(f"{row[name]:.2g}" for name in names)])
    headings = ["gradients", "values lost at 10%", "in bursts", "rows together"]
    headings += ["error without loss", "at 10%", "rows together"]
    return markdown(headings, rows)


def pipelined_schedules() -> str:
    """Write shares of bytes under computation in schedules for H200: pipelined_h200.json."""
    rows = [
        [
            f"`{row['topology']}`",
            "pipelined" if row["pipelined"] else "gather at the end",
            str(row["buckets_per_layer"]),
            f"{row['gathered_under_forward']:.0%}",
            f"{row['scattered_under_backward']:.0%}",
        ]
        for row in results_of("research/pipelined_h200")["steps"]
    ]
    header = ["topology", "step", "buckets in a layer"]
    header += ["gathered bytes under the forward pass", "scattered bytes under the backward pass"]
    return markdown(header, rows)


def halves() -> str:
    """Write the range of the error of pipelined steps over that of an all-reduce: halves.json."""
    rows = results_of("research/halves")
    ratios = [row["pipelined"] / row["pmean"] for row in rows]
    tensors, budgets = {row["tensor"] for row in rows}, {row["bits"] for row in rows}
    return (
        f"For {len(tensors)} kinds of tensors, {min(budgets):g} to {max(budgets):g} bits and 2, 4 "
        f"and 8 workers in a ring, the error of both halves is {min(ratios):.2f} to "
        f"{max(ratios):.2f} times that of `dq.pmean` with the same method and one bucket "
        "(`python -m research.benchmarks.halves`).\n"
    )


def scattered() -> str:
    """Write the range of the error of a reduce-scatter over that of an all-reduce, by tensor and
    workers: halves.json.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for row in results_of("research/halves"):
        ratio = row["psum_scatter"] / row["pmean"]
        found.setdefault((row["tensor"], row["workers"]), []).append(ratio)
    workers = sorted({workers for _, workers in found})
    budgets = sorted({row["bits"] for row in results_of("research/halves")})
    tensors = ("equal rows", "four regions", "language model", "transformer gradient 100")
    rows = [
        [tensor, *(f"{min(found[tensor, n]):.2f} to {max(found[tensor, n]):.2f}" for n in workers)]
        for tensor in dict.fromkeys(tensor for tensor, _ in found)
        if tensor.removesuffix(", leaves") in tensors
    ]
    of_bits = f"{budgets[0]:g} to {budgets[-1]:g} bits"
    return markdown([of_bits, *(f"{n} workers" for n in workers)], rows)


def pipelined_times() -> str:
    """Write times of steps over emulated links, beside those of their parts: pipelined.json."""
    names = ("forward", "backward", "scatter", "gather", "model_serial")
    rows = [
        [
            format_rate(row["rate"]),
            *(format_seconds(row[name]) for name in (*names, "unpipelined", "pipelined")),
        ]
        for row in results_of("research/pipelined")
    ]
    header = ["link", "forward u", "backward b", "scatter s", "gather g", "u + b + s + g"]
    header += ["gather at the end", "pipelined"]
    return markdown(header, rows)


def islands() -> str:
    """Write final losses of islands, beside local SGD in one job: islands.json."""
    results = results_of("islands")
    known, rows = results["one job"]["loss"], []
    for name in results:
        if "@" in name or name == "parameters":
            continue
        row = results[name]
        came = row.get("came", [])
        times = f"killed {row.get('kills')} times"
        label = name.replace("killed", f"one of them {times}")
        rows.append(
            [
                "local SGD in one job" if name == "one job" else label,
                f"{row['loss']:.4f}",
                f"{row['loss'] / known - 1:+.2%}",
                f"{sum(count == max(came) for count in came)} of {len(came)}" if came else "",
                f"{row['rounds_missed_by_others']}" if came else "",
            ]
        )
    header = ["run, 4 bits, 20 local steps", "loss", "against one job", "rounds with all three"]
    return markdown([*header, "rounds missed by the others"], rows)


def rounds_until(losses: list[float], rounds: int, target: float) -> float | None:
    """Return the rounds until a curve first has a loss, between its points by a line.

    Args:
      losses: at equal distances, the first one before the first round.
      rounds: of the whole curve.
      target: the loss.
    """
    each = rounds / (len(losses) - 1)
    for place, (before, after) in enumerate(itertools.pairwise(losses)):
        if after <= target <= before:
            return each * (place + (before - target) / max(before - after, 1e-9))
    return None


def islands_rounds() -> str:
    """Write losses of islands with sparse messages: islands_rounds.json."""
    found = results_of("islands_rounds")
    by_setting = {row["setting"]: row for row in found["rows"]}
    exact = by_setting["exact"]["mean"]
    each, sixty = 10, 5  # rounds between losses, and the place of the one after 60
    rows = []
    for row in (by_setting[setting] for setting in _ISLAND_MESSAGES):
        losses = row["mean"]
        rounds = rounds_until([found["before"], *losses], each * len(losses), exact[sixty])
        until = "not reached" if rounds is None else f"{rounds / 60:.2f}x"
        lowest = f"{min(losses):.3f} ({each * (losses.index(min(losses)) + 1)})"
        cells = f"{row['bits']:.2f}", f"{losses[sixty]:.3f}", lowest, f"{losses[-1]:.3f}", until
        rows.append([row["setting"], *cells])
    header = ["messages", "bits a coordinate", "loss after 60 rounds", "lowest loss (rounds)"]
    return markdown([*header, "at the end", "rounds to the loss of exact after 60"], rows)


def islands_real_lm() -> str:
    """Write held-out losses of a real model by rounds: islands_real_lm.json."""
    by_setting = {row["setting"]: row for row in results_of("islands_real_lm")["rows"]}
    rows = [by_setting[setting] for setting in _ISLAND_MESSAGES if setting in by_setting]
    rounds = [3 * (number + 1) for number in range(len(rows[0]["losses"]))]
    cells = [[row["setting"], *(f"{loss:.3f}" for loss in row["losses"][1::3])] for row in rows]
    return markdown(["messages", *(f"after {number} rounds" for number in rounds[1::3])], cells)


def islands_bad_days() -> str:
    """Write what a bad day of one island of four costs: islands_bad_days.json."""
    rows = results_of("islands_bad_days")
    without = rows[0]["loss"]
    cells = [
        [
            row["day"],
            "" if row is rows[0] else f"{row['loss'] / without - 1:+.1%}",
            f"{row['without']}",
            f"{row['longest']:.1f} s",
            "; ".join(re.split(r"[:.](?= |$)", text)[0] for text in row["shown"]),
        ]
        for row in rows
    ]
    header = ["what happens in round 10", "loss after 50 rounds", "rounds without it"]
    return markdown([*header, "longest exchange of the others", "shown for it"], cells)


def islands_codec() -> str:
    """Write times of encoding and decoding messages of islands: islands_codec.json."""
    results = results_of("islands_codec")
    names = ("encode", "decode", "decode, NumPy")
    rows = [
        [row["message"], *(f"{row['ns'][name]:.1f} ns" for name in names)]
        for row in results["rows"]
        if row["message"] in _ISLAND_MESSAGES
    ]
    beside = ", ".join(f"{name} {ns:.1f} ns" for name, ns in results["ns"].items())
    return markdown(["messages", *names], rows) + f"\nBeside them: {beside}.\n"


def islands_bandwidth() -> str:
    """Write times to a loss of islands and plain steps by bandwidth: islands_bandwidth.json."""
    results = results_of("islands_bandwidth")
    names = list(results["rows"][0]["times"])
    rows = [
        [
            format_rate(row["rate"]),
            *(
                f"**{row['times'][n]:.2f}**" if n == row["first"] else f"{row['times'][n]:.2f}"
                for n in names
            ),
        ]
        for row in results["rows"]
    ]
    plain = f"From {format_rate(results['plain_from'])} on, a plain step is the first."
    return markdown(["link", *names], rows) + f"\n{plain}\n"


def islands_memory() -> str:
    """Write bytes and seconds of joins and exchanges: islands_memory.json."""
    found = results_of("islands_memory")["rows"]
    rows = [
        [
            f"{row['size'] / 1e6:.0f} M",
            row["message"],
            row.get("state_on", "device") + (", donated" if row.get("donate") else ""),
            f"{row['on devices'] / row['size']:.0f}",
            *(
                cell
                for name in ("join", "exchange")
                for cell in (
                    f"{row[name]['peak'] / row['size']:.0f}",
                    f"{row[name]['seconds']:.1f} s",
                )
            ),
        ]
        for row in found
        if row["size"] in (found[0]["size"], found[-1]["size"])
    ]
    header = ["parameters", "messages", "state", "between exchanges, on devices", "join, peak"]
    return markdown([*header, "join", "exchange, peak", "exchange"], rows)


def islands_links() -> str:
    """Write times to losses of islands over slow links, beside all-reduces: islands_links.json."""
    results = results_of("islands_links")
    rows, found = [], results["rows"]
    for row in found:
        if row["fraction"] != 0.8:
            continue
        first = found[0]
        cells = [
            "" if own is None else f"{own:.1f} s ({first['seconds'][rate] / own:.1f}x)"
            for rate, own in row["seconds"].items()
        ]
        rows.append([row["run"], f"{row['steps']:.0f}", *cells])
    rates = [format_rate(parse_rate(rate, "rate")) for rate in found[0]["seconds"]]
    table = markdown(["run", "steps", *rates], rows)
    alone = format_seconds(results["computing"])
    return f"{table}\nA local step of one worker takes {alone} alone.\n"


ALL: tuple[Callable[[], str], ...] = (
    local_sgd,
    reference_dtype,
    local_sgd_times,
    pipelined_schedules,
    halves,
    scattered,
    pipelined_times,
    drop_compute_simulated,
    drop_compute_processes,
    moshpit_laws,
    moshpit_schemes,
    moshpit_errors,
    moshpit_training,
    messages_under_loss,
    packet_loss,
    islands,
    islands_rounds,
    islands_real_lm,
    islands_bad_days,
    islands_codec,
    islands_bandwidth,
    islands_memory,
    islands_links,
)
