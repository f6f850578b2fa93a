"""`dynamiq-jax advise`: whether to compress, and how, from the cost model."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax._workshop import tables
from dynamiq_jax._workshop.error_law import error_growth
from dynamiq_jax._workshop.errors import CommandError
from dynamiq_jax._workshop.units import (
    check_codec_ns,
    format_bytes,
    format_rate,
    format_seconds,
    parse_rate,
    parse_size,
)
from dynamiq_jax.methods import Axis, Call
from dynamiq_jax.topologies import AllToAll, Butterfly, CodecSpeed, FixedTopology, Network, Ring
from dynamiq_jax.topologies._cost_model import (
    CODEC_SPEEDS,
    SUM_SPEEDS,
    Prediction,
    predict,
    predict_exact,
)

_WORTH_IT = 1.05  # a step that gains less is not worth another moving part
_ITEM_BYTES = {"f32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to sum gradients, with the time that a training step would take."""

    name: str
    call: str  # how it is written in a program
    bits: float  # on the wire per coordinate in one pass
    sent: int  # bytes of each worker
    all_reduce: Prediction
    step: float  # seconds
    error_growth: float | None  # vNMSE over that of one compression; None: exact


@dataclasses.dataclass(frozen=True)
class Advise:
    """Whether compression pays on your network, with which bits and topology.

    Predicts the time of a training step from the speed of the link, the size of the gradient and
    the speed of the codec. Nothing is run: a minute with `dynamiq-jax bench` on your hardware gives
    a better --codec-ns than the built-in one, in its last line.
    """

    link: str = "10gbit"
    """Speed of the slowest link of each worker, in one direction: 10gbit, 400gbit. With fast links
    inside hosts and axis_name=("hosts", "local"), that of one host."""

    size: str = "1G"
    """Gradient coordinates of each worker, one for every parameter: 350M, 7G. With several axes,
    divided by the workers of the fast ones."""

    workers: int = 8
    """Workers of the axis."""

    step_time: float = 1.0
    """Seconds of a training step without the all-reduce."""

    overlap: float = 0.0
    """Share of that time under which transfers can hide; 0.5 is usual with buckets on a GPU."""

    gradient: Literal["f32", "bf16"] = "bf16"
    """What jax.lax.psum sends today. (XLA:CPU sends float32 in any case.)"""

    device: Literal["gpu", "cpu"] = "gpu"
    """Where the codec runs."""

    codec_ns: float | None = None
    """Nanoseconds of codec of a worker for each coordinate of its gradient: what `bench` calls
    codec ns."""

    latency_us: float = 50.0
    """Microseconds from the start of a transfer to its first byte."""

    oversubscription: float = 1.0
    """How much slower the network is when everybody talks across it at once."""

    bits: tuple[float, ...] = (4.0, 5.0, 6.0)
    """Budgets to consider. 5 keeps the accuracy of BF16; 4 is for those who check their loss."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all predictions to this file."""

    def run(self) -> int:
        """Prints the predictions and the advice; returns the exit status."""
        tables.check_outputs(self.json, None)
        options = predictions(self)
        console = tables.console()
        console.print(_table(self, options))
        console.print(advice(self, options))
        rows = [dataclasses.asdict(option) for option in options]
        tables.save_json(self.json, self.device, dataclasses.asdict(self), rows)
        return 0


def predictions(question: Advise) -> list[Option]:
    """Every option, today's first.

    Raises:
      CommandError: what was asked is not possible.
    """
    if question.workers < 2:
        raise CommandError(f"--workers is {question.workers}: give at least 2.")
    if question.step_time <= 0:
        raise CommandError(f"--step-time is {question.step_time}: give seconds above 0.")
    if not 0 <= question.overlap <= 1:
        raise CommandError(f"--overlap is {question.overlap}: give a share from 0 to 1.")
    check_codec_ns(question.codec_ns)
    size, workers = parse_size(question.size, "--size"), question.workers
    try:
        network = Network(
            gbit_per_s=parse_rate(question.link, "--link") / 1e9,
            latency_us=question.latency_us,
            oversubscription=question.oversubscription,
        )
        methods = [dq.DynamiQ(bits=bits) for bits in question.bits]
        codec = CODEC_SPEEDS[question.device]
        if question.codec_ns is not None:
            codec = dataclasses.replace(codec, ns_per_coordinate=question.codec_ns)
    except ValueError as error:
        raise CommandError(str(error)) from None
    sums = SUM_SPEEDS[question.device]

    item_bytes = _ITEM_BYTES[question.gradient]
    plain = predict_exact(size, workers, network=network, codec=sums, item_bytes=item_bytes)
    sent = 2 * (workers - 1) * -(-size * item_bytes // workers)
    name = f"psum, {question.gradient}"
    bits = 8.0 * item_bytes
    options = [Option(name, "jax.lax.psum", bits, sent, plain, _step(question, plain), None)]
    topologies: dict[str, FixedTopology] = {
        "ring": Ring(),
        "butterfly": Butterfly(),
        "all_to_all": AllToAll(),
    }
    return options + [
        _compressed(question, size, method, topology_name, topology, network, codec)
        for method in methods
        for topology_name, topology in topologies.items()
        if topology.supports(workers)
    ]


def _compressed(
    question: Advise,
    size: int,
    method: dq.DynamiQ,
    topology_name: str,
    topology: FixedTopology,
    network: Network,
    codec: CodecSpeed,
) -> Option:
    workers = question.workers
    call = Call(size=size, axis=Axis("data", workers), topology=topology)
    cost = method.wire_cost(call)
    time = predict(size, workers, topology, cost, network, codec)
    return Option(
        name=f"{method.bits:g} bits, {topology_name}",
        call=f'method=dq.DynamiQ(bits={method.bits}), topology="{topology_name}"',
        bits=method.bits,
        sent=topology.bytes_sent(cost, workers),
        all_reduce=time,
        step=_step(question, time),
        error_growth=error_growth(topology, workers, agreement=0.1),
    )


def _step(question: Advise, all_reduce: Prediction) -> float:
    """Seconds of a step: transfers hide under a share of it, the codec does not."""
    hidden = question.overlap * question.step_time
    return question.step_time + all_reduce.codec + max(0.0, all_reduce.wire - hidden)


def advice(question: Advise, options: list[Option]) -> str:
    """One paragraph: what to do, and why."""
    plain, *compressed = options
    if not compressed:
        return "Nothing to advise: --bits is empty."
    # Budgets under 5 bits are the user's choice, not ours, where others are considered.
    trusted = [option for option in compressed if option.bits >= 5] or compressed
    fewest = min(option.bits for option in trusted)
    best = min(
        (option for option in trusted if option.bits == fewest),
        key=lambda option: (option.step, option.error_growth),
    )
    gain = plain.step / best.step
    if gain < _WORTH_IT:
        return (
            f"[bold]Do not compress.[/bold] At {format_rate(parse_rate(question.link))} "
            f"{best.name} would make a step of {format_seconds(plain.step)} take "
            f"{format_seconds(best.step)} ({gain:.2f}x): the all-reduce is not what you wait for."
        )
    return (
        f"[bold]Compress[/bold]: {best.call}. A step takes {format_seconds(best.step)} instead of "
        f"{format_seconds(plain.step)} ([bold]{gain:.2f}x[/bold]), the all-reduce "
        f"{format_seconds(best.all_reduce.total)} instead of "
        f"{format_seconds(plain.all_reduce.total)}."
    )


def _table(question: Advise, options: list[Option]) -> Table:
    plain = options[0]
    table = tables.table(
        f"{question.workers} workers on {format_rate(parse_rate(question.link))}, gradient of "
        f"{question.size} coordinates, {format_seconds(question.step_time)} of computing a step",
        ("all-reduce",),
        ("sent by each", "codec", "wire", "step", "speed-up", "error, compressions"),
    )
    for option in options:
        table.add_row(
            option.name,
            format_bytes(option.sent),
            format_seconds(option.all_reduce.codec),
            format_seconds(option.all_reduce.wire),
            format_seconds(option.step),
            f"{plain.step / option.step:.2f}x",
            "" if option.error_growth is None else f"{option.error_growth:.1f}",
        )
    table.caption = (
        "Predicted. error, compressions: vNMSE of the sum over that of one compression at the same "
        "bits; one bit more divides both by about 4."
    )
    if question.codec_ns is None and question.device == "gpu":
        table.caption += " Codec time on a GPU: estimated from bytes, not measured."
    return table
