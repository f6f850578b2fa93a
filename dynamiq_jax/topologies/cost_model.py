"""Time of an all-reduce, predicted from its bytes, its steps and the speed of the codec.

A worker encodes and decodes every coordinate of its bucket once on any topology, sends and receives
at the same time, and does one after the other: codec, transfer, codec. Not counted: in an
all-to-all of eight or more workers DynamiQ's codec takes about a tenth more time, to order the sums
again.
"""

import dataclasses
import numbers
from typing import Any

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.topologies.base import Topology


def _check_positive(name: str, value: Any, *, zero: bool = False) -> None:
    if not (isinstance(value, numbers.Real) and (float(value) > 0 or (zero and value == 0))):
        raise ValueError(f"{name}={value!r} is not possible. Give a positive number.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What connects the workers of the (slow) axis, in each direction."""

    gbit_per_s: float = 10.0  # of one worker's link
    latency_us: float = 50.0  # from the start of a transfer to its first byte
    efficiency: float = 0.956  # payload over what the link carries: 1448 of 1514 bytes in TCP
    oversubscription: float = 1.0  # how much slower transfers are when all talk across at once

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _check_positive(field.name, value, zero=field.name == "latency_us")

    def seconds(self, num_bytes: float, steps: int) -> float:
        """Time of transfers of `num_bytes` in all, of one worker, `steps` one after the other."""
        rate = self.gbit_per_s * 1e9 / 8 * self.efficiency
        return num_bytes / rate + steps * self.latency_us * 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecSpeed:
    """Time that a worker needs beside the network."""

    ns_per_coordinate: float  # statistics, encoding and decoding of one coordinate of a bucket
    us_per_step: float = 0.0  # what one more step costs: launches, small arrays

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _check_positive(field.name, getattr(self, field.name), zero=True)

    def seconds(self, size: int, steps: int) -> float:
        """Time for a bucket of `size` coordinates in `steps` steps."""
        return size * self.ns_per_coordinate * 1e-9 + steps * self.us_per_step * 1e-6


# DynamiQ at 5 bits from float32. CPU: two cores for one worker, benchmarks/codec.py. GPU: an H200,
# whose kernels move 18.5 bytes a coordinate, at 60 % of its copy speed; not measured yet.
CODEC_SPEEDS = {
    "cpu": CodecSpeed(ns_per_coordinate=8.0, us_per_step=500.0),
    "gpu": CodecSpeed(ns_per_coordinate=0.0075, us_per_step=10.0),
}
# The sum of an exact all-reduce: 12 bytes of memory a coordinate.
SUM_SPEEDS = {
    "cpu": CodecSpeed(ns_per_coordinate=0.5, us_per_step=100.0),
    "gpu": CodecSpeed(ns_per_coordinate=0.003, us_per_step=5.0),
}


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
    *,
    topology: Topology,
    cost: WireCost,
    network: Network,
    codec: CodecSpeed,
) -> Prediction:
    """Time of an all-reduce by a method.

    Args:
      size: coordinates of the bucket.
      num_workers: size of the axis.
      topology: what carries it.
      cost: the method's bytes for this bucket.
      network: what connects the workers.
      codec: the method's speed.
    """
    scattered = topology.payloads_scattered(num_workers) * cost.payload_bytes
    gathered = scattered + cost.statistics_bytes
    far = network.oversubscription if topology.is_far else 1.0
    steps = topology.steps(num_workers)
    statistics_steps = 1 + _library_steps(num_workers) if cost.statistics_bytes else 0
    transfers = steps + _library_steps(num_workers) + statistics_steps
    return Prediction(
        codec=codec.seconds(size, steps + 2),
        wire=network.seconds(scattered * far + gathered, transfers),
    )


def predict_exact(
    size: int, num_workers: int, *, network: Network, codec: CodecSpeed, item_bytes: int = 4
) -> Prediction:
    """Time of `lax.psum` of a bucket of `size` coordinates of `item_bytes` each."""
    sent = 2 * (num_workers - 1) / num_workers * size * item_bytes
    steps = 2 * _library_steps(num_workers)
    return Prediction(codec=codec.seconds(size, steps), wire=network.seconds(sent, steps))


def _library_steps(num_workers: int) -> int:
    """Steps of an exact gather or reduce-scatter: libraries know algorithms for small ones."""
    return (num_workers - 1).bit_length()
