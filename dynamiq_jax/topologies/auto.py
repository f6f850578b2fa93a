"""The topology that the cost model finds fastest; none where compression does not pay."""

import dataclasses
from typing import Protocol

import jax

from dynamiq_jax.chunks import WireCost
from dynamiq_jax.topologies.all_to_all import AllToAll
from dynamiq_jax.topologies.base import Topology
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.cost_model import (
    CODEC_SPEEDS,
    SUM_SPEEDS,
    CodecSpeed,
    Network,
    predict,
    predict_exact,
)
from dynamiq_jax.topologies.ring import Ring


class _HasWireCost(Protocol):
    def wire_cost(self, size: int, num_workers: int, num_chunks: int) -> WireCost: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto:
    """Picks a topology for every bucket, by its size, the number of workers and the network.

    Where exact sums are as fast, the bucket is summed exactly. Say what the network is: the default
    is 10 Gbit/s with 50 us between hosts that all talk at full speed.
    """

    network: Network = dataclasses.field(default_factory=Network)
    # None: `CODEC_SPEEDS` of the device, measured on a CPU, estimated from bytes on a GPU.
    codec: CodecSpeed | None = None

    def __post_init__(self):
        if not isinstance(self.network, Network):
            raise ValueError(
                f"network={self.network!r} is not a network. Give one, such as "
                "Network(gbit_per_s=25)."
            )
        if not isinstance(self.codec, CodecSpeed | None):
            raise ValueError(
                f"codec={self.codec!r} is not a speed. Give None, for what was measured on this "
                "kind of device, or CodecSpeed(ns_per_coordinate=0.02)."
            )

    def choose(
        self, method: _HasWireCost, size: int, num_workers: int
    ) -> tuple[Topology, str | None]:
        """The fastest topology for a bucket, and why it had better be summed exactly, if so."""
        platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
        codec = self.codec or CODEC_SPEEDS[platform]

        def seconds(topology: Topology) -> float:
            cost = method.wire_cost(size, num_workers, topology.num_chunks(num_workers))
            return predict(
                size,
                num_workers,
                topology=topology,
                cost=cost,
                network=self.network,
                codec=codec,
            ).total

        # Of two that are as fast, the one with the lower error comes first.
        candidates: tuple[Topology, ...] = (AllToAll(), Butterfly(), Ring())
        best = min((c for c in candidates if c.supports(num_workers)), key=seconds)
        exact = predict_exact(size, num_workers, network=self.network, codec=SUM_SPEEDS[platform])
        if exact.total > seconds(best):
            return best, None
        return best, (
            f"{size} coordinates over {num_workers} workers at {self.network.gbit_per_s:g} Gbit/s "
            "are faster without compression"
        )
