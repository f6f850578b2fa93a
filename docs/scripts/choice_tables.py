"""Table of the page on which method to take, from result files and the cost model of `advise`."""

from docs.scripts.advised import between_slices, break_even_gbit, gain_of_a_step, gain_on_pcie
from docs.scripts.real_lm_tables import rows_of
from docs.scripts.result_files import exponent, markdown, results_of
from dynamiq_jax._prediction.device_speeds import PCIE_LINKS, TPU_LINKS, DeviceKind

_UNLESS_HIDDEN = '`"dynamiq:5"` where `psum` does not hide'
_ON_NETWORK_CARDS = {10: '`"dynamiq:5"`', 100: '`"dynamiq:5"`', 400: _UNLESS_HIDDEN}  # Gbit/s
_ON_PCIE = {"pcie4": _UNLESS_HIDDEN, "pcie5": "`jax.lax.pmean`"}
assert _ON_PCIE.keys() == PCIE_LINKS.keys()


def which_method() -> str:
    """Write which method to take on which link, with one figure for each."""
    sgd = _times_to_target("time_to_accuracy_local_sgd", 10e6)
    far = sgd["bf16:ring"] / sgd["dynamiq:4:ring@20x2"]
    slow = _times_to_target("time_to_accuracy", 100e6)
    fast = _times_to_target("time_to_accuracy", 1000e6)
    errors = {row["method"]: row["vnmse"] for row in rows_of("ring", "auto")}
    of_bf16, of_f32 = (break_even_gbit("cpu", "100M", kind) for kind in ("bf16", "f32"))
    nvlink, hiding = (gain_of_a_step("3600gbit", overlap) for overlap in (0.0, 0.5))
    rows = [
        [
            "between sites, 10 Mbit/s",
            '[local SGD](workers/local_sgd.md) with `"dynamiq:4"`',
            f"measured: {far:.0f} times sooner at the same loss than BF16 in every step, with "
            "twice the computation and data",
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
        [
            f"more than {of_bf16:g} Gbit/s, CPUs",
            '`"bf16"`',
            f"predicted: 16 bits take less time than 5; above {of_f32:g} Gbit/s, so does `psum` of "
            "float32",
        ],
        *(
            [
                f"{gbit} Gbit/s, GPUs",
                take,
                f"predicted: {gain_of_a_step(f'{gbit}gbit'):.2f}x BF16, "
                f"{gain_of_a_step(f'{gbit}gbit', 0.5):.2f}x half hidden",
            ]
            for gbit, take in _ON_NETWORK_CARDS.items()
        ),
        [
            f"25 to 100 Gbit/s, slices of TPU {', '.join(kind[4:] for kind in TPU_LINKS)}",
            '[`"dynamiq:5"`](recipes/tpus.md) where `psum` does not hide',
            f"predicted: {', '.join(f'{_gain_between_slices(kind):.2f}x' for kind in TPU_LINKS)} "
            "BF16, all-reduce alone",
        ],
        [
            "NVLink inside one host",
            "`jax.lax.pmean`",
            f"predicted: {nvlink:.2f}x BF16, {hiding:.2f}x half hidden",
        ],
        *(
            [
                f"[PCIe {kind[-1]}](should_i_compress.md#one-host-with-pcie), 8 GPUs, no NVLink",
                take,
                f"predicted: {gain_on_pcie(kind):.2f}x BF16, "
                f"{gain_on_pcie(kind, 0.5):.2f}x half hidden",
            ]
            for kind, take in _ON_PCIE.items()
        ),
        [
            "any, with the least error",
            '`"bf16"`',
            "half the bytes of float32; vNMSE on SmolLM2 {}, where 5 bits have {}".format(
                *(exponent(errors[name]) for name in ("bf16", "dynamiq:5"))
            ),
        ],
        [
            "any, the safe choice",
            '`"bf16:all_to_all"`',
            "vNMSE of made-up gradients {} with 16 workers, where a ring has {}".format(*_safe()),
        ],
    ]
    return markdown(["slowest link of a worker", "take", "one figure"], rows)


def _safe() -> list[str]:
    """Return the error of BF16 on an all-to-all of 16 workers, and that on a ring."""
    rows = {(row["topology"], row["workers"]): row for row in results_of("compare_bf16")}
    return [exponent(rows[topology, 16]["vnmse"]) for topology in ("all_to_all", "ring")]


def _gain_between_slices(kind: DeviceKind) -> float:
    plain, ours = (option.all_reduce for option in between_slices(kind, "256Mi"))
    return plain.total / ours.total


def _times_to_target(name: str, rate: float) -> dict[str, float]:
    """Return seconds to the 99 % target on a link, by setting."""
    links = [row for row in results_of(name)["links"] if row["rate"] == rate]
    seconds = {row["setting"]: row["to_target"]["0.99"]["seconds"] for row in links}
    return {setting: time for setting, time in seconds.items() if time is not None}
