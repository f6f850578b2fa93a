"""Choice of a topology for every bucket by the cost model, or of exact sums."""

import dataclasses

from dynamiq_jax.topologies._all_to_all import AllToAll
from dynamiq_jax.topologies._base import Choice, CostOf, FixedTopology, Topology
from dynamiq_jax.topologies._butterfly import Butterfly
from dynamiq_jax.topologies._cost_model import (
    CodecSpeed,
    Network,
    predict,
    predict_exact,
)
from dynamiq_jax.topologies._device_speeds import CODEC_SPEEDS, SUM_SPEEDS, default_device_kind
from dynamiq_jax.topologies._ring import Ring
from pallas_kernels._jax.compat import override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Topology):
    """Topology selected for every bucket by its size, the number of workers and the network.

    A bucket is summed exactly where this is as fast. Describe your network: the default
    is 10 Gbit/s with 50 us between hosts that all send at full speed.
    """

    network: Network = dataclasses.field(default_factory=Network)
    # None: `CODEC_SPEEDS` of the device, those of DynamiQ.
    codec: CodecSpeed | None = None

    def __post_init__(self):
        if not isinstance(self.network, Network):
            raise ValueError(
                f"network={self.network!r} is not a network. Give one, such as "
                "Network(gbit_per_s=25)."
            )
        if not isinstance(self.codec, CodecSpeed | None):
            raise ValueError(
                f"codec={self.codec!r} is not a speed. Give None, for the speed that was measured "
                "on this kind of device, or CodecSpeed(ns_per_coordinate=0.02)."
            )

    @override
    def choose(self, size: int, num_workers: int, cost_of: CostOf) -> Choice:
        kind = default_device_kind()
        codec, sums = self.codec or CODEC_SPEEDS[kind], SUM_SPEEDS[kind]

        def seconds(topology: FixedTopology) -> float:
            cost = cost_of(topology)
            return predict(size, num_workers, topology, cost, self.network, codec).total

        # Of two that are as fast, the one with the lower error comes first.
        candidates: tuple[FixedTopology, ...] = (AllToAll(), Butterfly(), Ring())
        best = min((c for c in candidates if c.supports(num_workers)), key=seconds)
        exact = predict_exact(size, num_workers, network=self.network, codec=sums)
        if exact.total > seconds(best):
            return best, None
        speed = f"{self.network.gbit_per_s:g} Gbit/s"
        return best, (
            f"{size} coordinates over {num_workers} workers at {speed} are faster without "
            "compression"
        )
