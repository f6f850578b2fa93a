"""Table of the page on which method to take, from result files and the cost model of `advise`."""

from docs.result_files import exponent, markdown, results_of
from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._workshop.advice import Option, predictions


def which_method() -> str:
    """Write which method to take on which link, with one figure for each."""
    sgd = _times_to_target("time_to_accuracy_local_sgd", 10e6)
    far = sgd["bf16:ring"] / sgd["dynamiq:4:ring@20x2"]
    slow = _times_to_target("time_to_accuracy", 100e6)
    fast = _times_to_target("time_to_accuracy", 1000e6)
    errors = {row["setting"]: row["vnmse"] for row in results_of("compare_ring")}
    rows = [
        [
            "between sites, 10 Mbit/s",
            '[local SGD](workers/local_sgd.md) with `"dynamiq:4"`',
            f"measured: {far:.0f} times sooner at the same loss than BF16 in every step",
        ],
        [
            "100 Mbit/s",
            '`"dynamiq:4"`',
            f"measured: {slow['bf16:ring'] / slow['dynamiq:4:ring']:.1f} times sooner than BF16",
        ],
        [
            "1 Gbit/s, CPUs",
            '`"dynamiq:5"`',
            f"measured: {fast['bf16:ring'] / fast['dynamiq:5:ring']:.1f} times sooner than BF16",
        ],
        *(
            [
                f"{gbit} Gbit/s, GPUs",
                '`"dynamiq:5"`',
                f"predicted: steps {_faster(gbit):.2f} times as fast as with BF16",
            ]
            for gbit in (10, 100, 400)
        ),
        [
            "NVLink, or inside one host",
            "`jax.lax.pmean`",
            f"predicted: steps {_faster(3600):.2f} times as fast if compressed",
        ],
        [
            "any, with the least error",
            '`"bf16"`',
            f"half the bytes of float32, error {exponent(errors['bf16:ring'])}",
        ],
    ]
    return markdown(["slowest link of a worker", "take", "one figure"], rows)


def _times_to_target(name: str, rate: float) -> dict[str, float]:
    """Return seconds to the 99 % target on a link, by setting."""
    links = [row for row in results_of(name)["links"] if row["rate"] == rate]
    seconds = {row["setting"]: row["to_target"]["0.99"]["seconds"] for row in links}
    return {setting: time for setting, time in seconds.items() if time is not None}


def _faster(gbit: int) -> float:
    """Return how much faster a step is predicted to be with 5 bits: 7 G coordinates, 8 GPUs."""
    plain, *others = predictions(Advise(link=f"{gbit}gbit", size="7G").question())
    fives: list[Option] = [option for option in others if option.bits == 5]
    return plain.step / min(option.step for option in fives)
