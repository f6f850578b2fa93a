"""Predicted times of a training step, with and without compression, and what follows from them."""

import dataclasses
from typing import Literal

import dynamiq_jax as dq
from dynamiq_jax._console.units import format_rate, format_seconds
from dynamiq_jax._prediction.cost_model import (
    Network,
    Prediction,
    bytes_of_host,
    predict,
    predict_exact,
)
from dynamiq_jax._prediction.device_speeds import (
    CODEC_SPEEDS,
    SUM_SPEEDS,
    TPU_LINKS,
    UTILIZATION,
    DeviceKind,
    hiding_tokens,
)
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import TOPOLOGIES

_WORTH_IT = 1.05  # a step that gains less is not worth another moving part
_TIE = 1.02  # steps whose times differ by less are as fast: the first topology is the default
_ITEM_BYTES = {"f32": 4, "bf16": 2}
_TOPOLOGIES = {name: make() for name, make in TOPOLOGIES.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A training step, and what it runs on."""

    network: Network
    size: int  # coordinates of the gradient
    workers: int  # devices of all hosts
    step_seconds: float  # without the all-reduce
    overlap: float  # share of that time under which transfers can hide
    gradient: Literal["f32", "bf16"]  # that jax.lax.psum sends today
    device: DeviceKind  # of the codec
    codec_ns: float | None  # of a worker for each coordinate; None: that of `CODEC_SPEEDS`
    methods: tuple[dq.DynamiQ, ...]  # to consider

    @property
    def hosts(self) -> int:
        """Number of hosts, or of workers that have a link each."""
        return self.workers // self.network.devices_per_host


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to sum gradients, with the time that a training step would take."""

    name: str
    topology: str | None  # its name; None for `jax.lax.psum`
    call: str  # how it is written in a program
    bits: float  # on the wire per coordinate in one pass
    is_flat: bool  # whether hosts have several devices, all of which are workers of one axis
    sent: int  # bytes of each worker over the compressed axis
    sent_by_host: float  # bytes of all of its workers to other hosts
    all_reduce: Prediction
    step: float  # seconds
    error_growth: float | None  # vNMSE over that of one compression; None: exact


def predictions(question: Question) -> list[Option]:
    """Predict the time of every option, today's `jax.lax.psum` first."""
    forms = (False, True) if question.network.devices_per_host > 1 else (False,)
    return [
        _plain(question),
        *(
            _compressed(question, method, name, is_flat)
            for method in question.methods
            for is_flat in forms
            for name, topology in _TOPOLOGIES.items()
            if topology.supports(question.workers if is_flat else question.hosts)
        ),
    ]


def advice(question: Question, options: list[Option]) -> str:
    """Write one paragraph, with the markup of rich, on what to do and why, from predictions."""
    plain, *compressed = options
    if not compressed:
        return "Nothing to advise: --bits is empty."
    best = _best(_considered(compressed))
    gain = plain.step / best.step
    if gain < _WORTH_IT:
        if plain.step <= _WORTH_IT * question.step_seconds:
            why = "the all-reduce adds at most 5% to a step"
        elif gain < 1:
            why = "the codec takes longer than the shorter transfer saves"
        else:
            why = "the gain is below 5%"
        return (
            f"[bold]Do not compress.[/bold] At {format_rate(1e9 * question.network.gbit_per_s)}, "
            f"{best.name}, would make a step of {format_seconds(plain.step)} take "
            f"{format_seconds(best.step)} ({gain:.2f}x): {why}.{_rule_of_thumb(question)}"
        )
    needs = (
        " It needs a network that carries all-to-all traffic at full speed."
        if best.topology == "all_to_all"
        else ""
    )
    return (
        f"[bold]Compress[/bold]: {best.call}.{needs} A step takes {format_seconds(best.step)} "
        f"instead of {format_seconds(plain.step)} ([bold]{gain:.2f}x[/bold]), the all-reduce "
        f"{format_seconds(best.all_reduce.total)} instead of "
        f"{format_seconds(plain.all_reduce.total)}.{_rule_of_thumb(question)}"
    )


def topologies_in_order(options: list[Option]) -> str:
    """Write one line with the predicted times of all topologies, and the one to give.

    It is empty if no budget is among the predictions.
    """
    if not (considered := _considered(options[1:])):
        return ""
    best = _best(considered)
    times = ", ".join(
        f"{option.topology} {format_seconds(option.all_reduce.total)}"
        for option in sorted(considered, key=lambda option: option.all_reduce.total)
    )
    return f"Topology for {best.bits:g} bits: {best.topology}. Predicted all-reduce: {times}."


def _considered(compressed: list[Option]) -> list[Option]:
    """Return the options with the fewest bits of at least 5, or the fewest of all.

    Flat ones are not among them: a host sends more, and each device encodes a whole gradient.
    """
    compressed = [option for option in compressed if not option.is_flat]
    # Budgets under 5 bits are the user's choice, not ours, where others are considered.
    trusted = [option for option in compressed if option.bits >= 5] or compressed
    fewest = min((option.bits for option in trusted), default=0.0)
    return [option for option in trusted if option.bits == fewest]


def _best(considered: list[Option]) -> Option:
    """Return the first option whose step is about as short as the shortest."""
    shortest = min(option.step for option in considered)
    return next(option for option in considered if option.step < _TIE * shortest)


def _rule_of_thumb(question: Question) -> str:
    """Write the batch from which on a sum between slices of TPUs hides anyway."""
    if question.device not in TPU_LINKS:
        return ""
    rate = 1e9 * question.network.gbit_per_s / question.network.devices_per_host
    item_bytes = _ITEM_BYTES[question.gradient]
    tokens = hiding_tokens(question.device, question.hosts, rate, item_bytes)
    return (
        f" Between {question.hosts} slices, psum of a dense model hides under the backward pass "
        f"from about {tokens:,.0f} tokens a slice and step on (at {UTILIZATION:.0%} of the peak): "
        "do not compress there."
    )


def _plain(question: Question) -> Option:
    parts, item_bytes = question.network.devices_per_host, _ITEM_BYTES[question.gradient]
    size, workers, network = _of_a_part(question, parts)
    speed = SUM_SPEEDS[question.device]
    time = predict_exact(size, workers, network=network, codec=speed, item_bytes=item_bytes)
    time = _after_inside(question, parts, time)
    sent = 2 * (workers - 1) * -(-size * item_bytes // workers)
    return Option(
        name=f"psum, {question.gradient}",
        topology=None,
        call="jax.lax.psum",
        bits=8.0 * item_bytes,
        is_flat=False,
        sent=sent,
        sent_by_host=parts * sent,
        all_reduce=time,
        step=_step(question, time),
        error_growth=None,
    )


def _compressed(question: Question, method: dq.DynamiQ, name: str, is_flat: bool) -> Option:
    """Predict an all-reduce between hosts, or between all devices of all hosts."""
    topology, parts = _TOPOLOGIES[name], 1 if is_flat else question.network.devices_per_host
    size, workers, network = _of_a_part(question, parts)
    speed = CODEC_SPEEDS[question.device]
    if question.codec_ns is not None:
        speed = dataclasses.replace(speed, ns_per_coordinate=question.codec_ns)
    cost = method.wire_cost(Call(size=size, axis=Axis("data", workers), topology=topology))
    time = predict(size, workers, topology, cost, network, speed)
    time = _after_inside(question, parts, time)
    by_host = bytes_of_host(topology, cost, workers, network.devices_per_host)
    axes = 'axis_name=("hosts", "local"), ' if parts > 1 else ""
    return Option(
        name=f"{method.bits:g} bits, {'flat ' if is_flat else ''}{name}",
        topology=name,
        call=f'{axes}method="dynamiq:{method.bits:g}:{name}"',
        bits=method.bits,
        is_flat=is_flat,
        sent=topology.bytes_sent(cost, workers),
        sent_by_host=parts * sum(by_host),
        all_reduce=time,
        step=_step(question, time),
        error_growth=topology.error_growth(workers, agreement=0.1),
    )


def _of_a_part(question: Question, parts: int) -> tuple[int, int, Network]:
    """Return the coordinates, workers and links of a sum of one of the parts of a gradient.

    Each device of a host has one, and a share of its link as well.
    """
    whole = question.network
    network = dataclasses.replace(
        whole, gbit_per_s=whole.gbit_per_s / parts, devices_per_host=whole.devices_per_host // parts
    )
    return -(-question.size // parts), question.workers // parts, network


def _after_inside(question: Question, parts: int, time: Prediction) -> Prediction:
    """Add the time of an exact sum inside of each host, whose links count as free."""
    inside = SUM_SPEEDS[question.device].seconds(question.size, 0) if parts > 1 else 0.0
    return dataclasses.replace(time, codec=time.codec + inside)


def _step(question: Question, all_reduce: Prediction) -> float:
    """Return the seconds of a step: transfers hide under a share of it, the codec does not."""
    hidden = question.overlap * question.step_seconds
    return question.step_seconds + all_reduce.codec + max(0.0, all_reduce.wire - hidden)
