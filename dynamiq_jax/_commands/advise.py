"""`dynamiq-jax advise`: whether to compress, and how, from the cost model."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

import dynamiq_jax as dq
from dynamiq_jax._console import options, records, tables
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._console.units import format_rate, format_seconds, parse_rate, parse_size
from dynamiq_jax._core.text import format_bytes
from dynamiq_jax._prediction.advice import (
    Option,
    Question,
    advice,
    predictions,
    topologies_in_order,
)
from dynamiq_jax._prediction.cost_model import Network
from dynamiq_jax._prediction.device_speeds import PCIE_CODEC_NS, PCIE_LINKS, TPU_LINKS, DeviceKind
from dynamiq_jax._prediction.islands import (
    LEAST_DENSE_BITS,
    SHARE,
    SPARSE,
    SPARSE_KINDS,
    MessageKind,
    faster_from,
    island_rounds,
    plain_time,
)

_MOST_WORKERS = 2**20
_USUAL_LINK = "10gbit"
_MOST = 1e9  # of times and factors: seconds of a step are 30 years


@dataclasses.dataclass(frozen=True)
class Advise:
    """Advise on compression for your network: bits, topology, or none.

    Predicts the time of a training step from the speed of the link, the size of the gradient and
    the speed of the codec, and runs nothing. For a better prediction, run `dynamiq-jax bench` on
    your hardware, and pass the --codec-ns that its last line prints.
    """

    link: str | None = None
    """Speed of the slowest link of each worker, in one direction: 10gbit, 400gbit. With
    --devices-per-host, that of a host, which its devices share. pcie4 and pcie5 are eight GPUs
    of one host without NVLink: 80gbit and 224gbit by public reports, and the codec of a GPU with an
    eighth of the memory bandwidth of an H200. By default 10gbit, and on a TPU the share of a chip
    of its host's network cards, which connect slices: 25gbit (v5e), 50gbit (v5p), 100gbit
    (v6e)."""

    size: str = "1G"
    """Gradient coordinates of each worker, one for every parameter: 350M, 7G. With several axes and
    no --devices-per-host, divided by the workers of the fast ones."""

    workers: int = 8
    """Workers of the axis. With --devices-per-host, the devices of all hosts."""

    devices_per_host: int = 1
    """Devices with fast links inside of a host, which share its link to the others. The advice is
    then for axis_name=("hosts", "local")."""

    step_time: float = 1.0
    """Seconds of a training step without the all-reduce."""

    overlap: float = 0.0
    """Share of that time under which transfers can hide; 0.5 is usual with buckets on a GPU."""

    gradient: Literal["f32", "bf16"] | None = None
    """What jax.lax.psum sends today. By default bf16, and f32 with --device cpu, since XLA:CPU
    sends float32 in any case."""

    device: DeviceKind = "gpu"
    """Where the codec runs. A worker on a TPU is a slice, if the axes are ("slices", "chips")."""

    codec_ns: float | None = None
    """Nanoseconds that the codec of a worker takes for each coordinate of its gradient: the column
    `codec ns` of `dynamiq-jax bench`."""

    latency_us: float = 50.0
    """Microseconds from the start of a transfer to its first byte."""

    oversubscription: float = 1.0
    """How much slower the network is when everybody talks across it at once."""

    bits: tuple[float, ...] = (4.0, 5.0, 6.0)
    """Bits a coordinate to consider. With 4 or fewer, compare your own loss with that of the exact
    mean."""

    every: int | None = None
    """Local steps between two rounds of islands (islands.Islands). If given, the last lines are the
    links that islands need, with sparse messages and with those of --bits, the share of the time
    that computes on this one, bytes, and the messages that are the fastest to a loss."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write all predictions to this file."""

    def run(self) -> int:
        """Print the predictions and the advice; return the exit status."""
        options.check_outputs(self.json)
        if len({*self.bits}) < len(self.bits):
            raise CommandError(f"--bits {self.bits}: one of them stands there twice.")
        question = self.question()
        predicted = predictions(question)
        records.keep(self, self.device, [dataclasses.asdict(option) for option in predicted])
        console = tables.console()
        console.print(_table(self, predicted))
        console.print(advice(question, predicted))
        if line := topologies_in_order(predicted):
            console.print(line)
        for line in self.island_links():
            console.print(line)
        return 0

    @property
    def rate(self) -> float:
        """Bits a second of the link."""
        if self.link is None and self.device in TPU_LINKS:  # which have the share of a chip
            return parse_rate(TPU_LINKS[self.device], "--link") * self.devices_per_host
        link = self.link or _USUAL_LINK
        return parse_rate(PCIE_LINKS.get(link, link), "--link")

    def island_links(self) -> list[str]:
        """Write the link that islands need, for each budget; nothing without --every."""
        if self.every is None:
            return []
        size, seconds = parse_size(self.size, "--size"), self.every * self.step_time
        dense = [MessageKind(bits) for bits in self.bits]
        islands = self.workers // self.devices_per_host  # a host has one link
        rounds = [
            island_rounds(size, islands, kind, seconds, self.rate, self.device == "cpu")
            for kind in (*SPARSE_KINDS, *dense)
        ]
        lines = [
            f"{islands} islands with a round every {self.every} steps need "
            f"{format_rate(each.rate)} each to exchange {each.message.bits:g} bits in {SHARE:.0%} "
            f"of the time. On this link, {each.computing[0]:.0%} to {each.computing[1]:.0%} of the "
            f"time computes; a message has {format_bytes(each.message_bytes)}, and a day "
            f"{format_bytes(each.bytes_a_day)}."
            for each in rounds
            if each.message in (SPARSE, *dense)
        ]
        kinds = (*SPARSE_KINDS, *(kind for kind in dense if kind.bits >= LEAST_DENSE_BITS))
        measured = [each for each in rounds if each.message in kinds]
        first, second = sorted(measured, key=lambda each: each.to_loss.on(self.rate))[:2]
        sooner = second.to_loss.on(self.rate) / first.to_loss.on(self.rate)
        keep, bits = first.message.keep, min(self.bits)
        name = "" if keep is None else f", islands.Sparse(keep={keep}),"
        all_reduces = plain_time(size, islands, bits, self.every, seconds)
        plain = faster_from(all_reduces, [each.to_loss for each in rounds])
        memory = format_bytes(4 * 4 * size)  # of four trees in float32
        return [
            *lines,
            f"To the same loss, messages of {first.message.bits:.2g} bits{name} are the fastest on "
            f"this link, {sooner:.2f} times as fast as those of {second.message.bits:.2g} bits. "
            f"They take {first.message.rounds:g} times the rounds of exact ones, as measured on a "
            f"small model. From {format_rate(plain)} on, an all-reduce of {bits:g} bits in every "
            "step is faster.",
            f"Parameters, reference, momentum and residual take {memory} on the host.",
        ]

    def question(self) -> Question:
        """Parse the options."""
        options.check_range("--workers", self.workers, 2, _MOST_WORKERS)
        options.check_range("--devices-per-host", self.devices_per_host, 1)
        if self.workers % self.devices_per_host or self.workers == self.devices_per_host:
            raise CommandError(
                f"--devices-per-host is {self.devices_per_host}, but --workers is {self.workers}. "
                "Give the devices of all hosts, at least two, as --workers."
            )
        options.check_range("--step-time", self.step_time, 1e-9, _MOST)
        options.check_range("--overlap", self.overlap, 0, 1)
        options.check_range("--codec-ns", self.codec_ns, 0, _MOST)
        options.check_range("--latency-us", self.latency_us, 0, _MOST)
        options.check_range("--oversubscription", self.oversubscription, 1, _MOST)
        options.check_range("--every", self.every, 1)
        if self.every is not None and not self.bits:
            raise CommandError("--every is for compressed rounds, but --bits is empty: give 5.")
        codec_ns = self.codec_ns
        if self.link in PCIE_LINKS:
            if self.device != "gpu":
                raise CommandError(
                    f"--link is {self.link}, which is between GPUs of one host, but --device is "
                    f"{self.device}. Give a rate, such as 10gbit, or --device gpu."
                )
            if self.devices_per_host > 1:
                raise CommandError(
                    f"--link is {self.link}, which is inside of a host, but --devices-per-host is "
                    "for the link between hosts. Give its rate, such as 10gbit."
                )
            codec_ns = PCIE_CODEC_NS if codec_ns is None else codec_ns
        try:
            methods = tuple(dq.DynamiQ(bits=bits) for bits in self.bits)
        except ValueError as error:
            raise CommandError(f"--bits: {error}") from None
        return Question(
            network=Network(
                gbit_per_s=self.rate / 1e9,
                devices_per_host=self.devices_per_host,
                latency_us=self.latency_us,
                oversubscription=self.oversubscription,
            ),
            size=parse_size(self.size, "--size"),
            workers=self.workers,
            step_seconds=self.step_time,
            overlap=self.overlap,
            gradient=self.gradient or ("f32" if self.device == "cpu" else "bf16"),
            device=self.device,
            codec_ns=codec_ns,
            methods=methods,
        )


def _table(asked: Advise, options: list[Option]) -> Table:
    plain = options[0]
    has_hosts = asked.devices_per_host > 1
    hosts = f", {asked.devices_per_host} on each host" if has_hosts else ""
    table = tables.table(
        f"{asked.workers} workers{hosts} on {format_rate(asked.rate)}, gradient of "
        f"{asked.size} coordinates, {format_seconds(asked.step_time)} of computing a step",
        ("all-reduce",),
        (
            "sent by a host" if has_hosts else "sent by each",
            *("codec", "wire", "step", "speed-up", "error"),
        ),
    )
    for option in options:
        table.add_row(
            option.name,
            format_bytes(option.sent_by_host),
            format_seconds(option.all_reduce.codec),
            format_seconds(option.all_reduce.wire),
            format_seconds(option.step),
            f"{plain.step / option.step:.2f}x",
            "" if option.error_growth is None else f"{option.error_growth:.1f}",
        )
    table.caption = (
        "Predicted. error: vNMSE of the sum over that of one compression at the same "
        "bits; one bit more divides both by 4 to 7."
    )
    if has_hosts:
        table.caption += (
            ' flat: one axis over all devices; others: axis_name=("hosts", "local"), and psum as '
            "well. Around a ring of all devices, psum sends up to twice as many. Links inside of a "
            "host count as free."
        )
    if asked.link in PCIE_LINKS:
        table.caption += (
            f" Not measured. The speed of {asked.link} is that of public reports; all_reduce_perf "
            "of NCCL measures yours, as bus bandwidth in GB/s: give 8 times that in gbit."
        )
    elif asked.codec_ns is None and asked.device != "cpu":
        table.caption += (
            " Codec time on a GPU: measured on one H200."
            if asked.device == "gpu"
            else " Codec time on a TPU: estimated from compiled cycles, not measured."
        )
    return table
