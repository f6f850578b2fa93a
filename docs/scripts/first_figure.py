"""The first figure of the README: the loss of four settings against time."""

from matplotlib import pyplot as plt

from docs.scripts.result_files import results_of

# Setting of the result file to the name and color of its line, the slowest first.
LINES = {
    "psum": ("exact, float32", "dimgray"),
    "bf16:ring": ("BF16", "tab:orange"),
    "mxfp8:ring": ("MXFP8", "tab:green"),
    "dynamiq:5:ring": ("DynamiQ, 5 bits", "tab:blue"),
}
RATE = 100  # Mbit/s: the slowest link that was measured


def first_figure() -> plt.Figure:
    """Draw the loss of four settings against time, on the slowest link."""
    results = results_of("time_to_accuracy")
    losses = {curve["setting"]: curve["losses"] for curve in results["curves"]}
    seconds = {
        row["setting"]: row["seconds"] for row in results["links"] if row["rate"] == RATE * 1e6
    }
    # At the width of a README, letters are as large as the text around the figure.
    with plt.rc_context({"font.size": 15}):
        figure, axes = plt.subplots(figsize=(8.3, 4))
        for setting, (name, color) in LINES.items():
            times = [seconds[setting][step] for step in losses[setting]]
            values = list(losses[setting].values())
            axes.plot(times, values, color=color, lw=3, label=name)
            axes.plot(times[-1], values[-1], "o", color=color, ms=9)
        axes.set(xlabel=f"seconds of training, links of {RATE} Mbit/s", ylabel="held-out loss")
        axes.set(xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figure
