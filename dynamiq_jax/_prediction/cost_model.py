"""Prediction of the time of an all-reduce from its bytes, its steps and the speed of the codec.

On any topology a worker encodes and decodes every coordinate of its bucket once. It sends and
receives at the same time. Codec and transfers follow one another. In an all-to-all of eight or more
workers, DynamiQ orders the rows of sums again. That takes its codec several times as long on a TPU,
and about a tenth more time elsewhere, which the model leaves out.
"""

import dataclasses

from dynamiq_jax._core import WireCost
from dynamiq_jax.methods import DynamiQ
from dynamiq_jax.topologies import AllToAll, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """Links between the workers of the (slow) axis, in each direction."""

    gbit_per_s: float = 10.0  # of one link
    devices_per_host: int = 1  # workers that share a link, that of their host
    latency_us: float = 50.0  # from the start of a transfer to its first byte
    efficiency: float = 0.956  # payload over all bytes on the link: 1448 of 1514 in TCP
    oversubscription: float = 1.0  # slowdown of transfers when all workers send across at once

    def seconds(self, num_bytes: float, steps: int) -> float:
        """Return the time in which one worker transfers `num_bytes` in `steps` steps."""
        rate = self.gbit_per_s * 1e9 / 8 * self.efficiency
        return num_bytes / rate + steps * self.latency_us * 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Time that a worker needs besides the network."""

    ns_per_coordinate: float  # statistics, encoding and decoding of one coordinate of a bucket
    us_per_step: float = 0.0  # cost of one more step: launches, small arrays
    ns_of_order: float = 0.0  # for each coordinate, where the rows of sums are ordered again

    def seconds(self, size: int, steps: int) -> float:
        """Return the time for a bucket of `size` coordinates in `steps` steps."""
        return size * self.ns_per_coordinate * 1e-9 + steps * self.us_per_step * 1e-6


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Parts of the time of one all-reduce, in seconds."""

    codec: float
    wire: float

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.codec + self.wire


def predict(
    size: int,
    num_workers: int,
    topology: Topology,
    cost: WireCost,
    network: Network,
    codec: CodecSpeed,
) -> Prediction:
    """Predict the time of an all-reduce of a bucket of `size` coordinates."""
    scattered, gathered = bytes_of_host(topology, cost, num_workers, network.devices_per_host)
    far = network.oversubscription if topology.is_far else 1.0
    steps = topology.steps(num_workers)
    statistics_steps = 1 + _library_steps(num_workers) if cost.statistics_bytes else 0
    transfers = steps + _library_steps(num_workers) + statistics_steps
    ordered = isinstance(topology, AllToAll) and DynamiQ.reorders_sums(num_workers)
    order_seconds = size * codec.ns_of_order * 1e-9 if ordered else 0.0
    return Prediction(
        codec=codec.seconds(size, steps + 2) + order_seconds,
        wire=network.seconds(scattered * far + gathered, transfers),
    )


def bytes_of_host(
    topology: Topology, cost: WireCost, num_workers: int, devices_per_host: int
) -> tuple[float, float]:
    """Return the bytes that a host sends to others up to the arrival, and all other bytes.

    A ring leaves each host once, and so do gathers. Other messages go straight to all workers, as
    half of the statistics do, whose other half is gathered. The workers are all devices of all
    hosts.
    """
    to_others = devices_per_host * (num_workers - devices_per_host)
    straight = to_others / max(num_workers - 1, 1)  # devices that would send as much as all send
    scattered = topology.bytes_scattered(cost, num_workers)
    gathered = topology.bytes_sent(cost, num_workers) - scattered - cost.statistics_bytes
    return (
        scattered * (straight if topology.is_far else 1),
        gathered + cost.statistics_bytes * (straight + 1) / 2,
    )


def predict_exact(
    size: int, num_workers: int, *, network: Network, codec: CodecSpeed, item_bytes: int = 4
) -> Prediction:
    """Predict the time of `lax.psum` of `size` coordinates of `item_bytes` each."""
    sent = 2 * (num_workers - 1) / num_workers * size * item_bytes
    steps = 2 * _library_steps(num_workers)
    return Prediction(codec=codec.seconds(size, steps), wire=network.seconds(sent, steps))


def _library_steps(num_workers: int) -> int:
    """Return the steps of an exact gather or reduce-scatter, as libraries implement them."""
    return (num_workers - 1).bit_length()
