"""Topologies: routes of chunks. A new one takes one file here and one line in `TOPOLOGIES`.

_base        interface of a topology
_ring, _butterfly, _all_to_all
_cost_model  prediction of the time of an all-reduce
_device_speeds  speed of codecs and sums, by the kind of device
_auto        choice by the cost model
"""

from dynamiq_jax._core import Axis, naming
from dynamiq_jax.topologies._all_to_all import AllToAll
from dynamiq_jax.topologies._auto import Auto
from dynamiq_jax.topologies._base import (
    Arrival,
    FixedTopology,
    Gathered,
    Scattered,
    Topology,
    gather,
)
from dynamiq_jax.topologies._butterfly import Butterfly
from dynamiq_jax.topologies._cost_model import CodecSpeed, Network
from dynamiq_jax.topologies._ring import Ring

__all__ = ["TOPOLOGIES", "AllToAll", "Arrival", "Auto", "Axis", "Butterfly"]
__all__ += ["CodecSpeed", "FixedTopology", "Gathered", "Network", "Ring"]
__all__ += ["Scattered", "Topology", "gather", "resolve_topology"]

# Names are those of the literature in lower case, with spaces and hyphens as underscores.
TOPOLOGIES: dict[str, type[Topology]] = {
    "auto": Auto,
    "ring": Ring,
    "butterfly": Butterfly,
    "all_to_all": AllToAll,
}


def resolve_topology(topology: Topology | str) -> Topology:
    """Return a topology as given, or the one of a name: "ring", "ring:unroll=True"."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and naming.head(topology) in TOPOLOGIES:
        return naming.make("topology", topology, TOPOLOGIES)
    raise ValueError(f"topology={topology!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
