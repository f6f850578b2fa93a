"""Predictions of `dynamiq-jax advise` that tables share."""

from typing import Literal

from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._prediction.advice import Option, predictions
from dynamiq_jax._prediction.device_speeds import DeviceKind


def at_five_bits(question: Advise) -> tuple[Option, Option]:
    """Return today's `psum` and the fastest topology at 5 bits."""
    plain, *compressed = predictions(question.question())
    options = [option for option in compressed if option.bits == 5]
    return plain, min(options, key=lambda option: (option.step, option.error_growth))


def gain_of_a_step(link: str, overlap: float = 0.0) -> float:
    """Return how many times faster a step of 7 G coordinates on 8 GPUs is with 5 bits."""
    plain, ours = at_five_bits(Advise(link=link, size="7G", overlap=overlap))
    return plain.step / ours.step


def gain_on_pcie(link: str, overlap: float = 0.0) -> float:
    """Return how many times faster a step of 1 G coordinates is on 8 GPUs of a host with PCIe."""
    plain, ours = at_five_bits(Advise(link=link, size="1G", overlap=overlap))
    return plain.step / ours.step


def break_even_gbit(device: DeviceKind, size: str, gradient: Literal["f32", "bf16"]) -> float:
    """Return the Gbit/s of a link below which 5 bits beat `psum`, with two digits."""
    question = Advise(link="10gbit", size=size, device=device, gradient=gradient)
    plain, ours = (option.all_reduce for option in at_five_bits(question))
    # Wire times shrink as the link gets faster, codec times stay; latencies are nothing.
    gbit_per_s = 10 * (plain.wire - ours.wire) / (ours.codec - plain.codec)
    return float(f"{gbit_per_s:.2g}")


def between_slices(device: DeviceKind, size: str, overlap: float = 0.0) -> tuple[Option, Option]:
    """Return `psum` and 5 bits between two slices; `size` is of the part that a chip sums."""
    question = Advise(device=device, size=size, workers=2, overlap=overlap, step_time=0.1)
    return at_five_bits(question)
