"""Topologies: how chunks travel. A new one is a file here and a line in `TOPOLOGIES`."""

from dynamiq_jax.topologies.all_to_all import AllToAll
from dynamiq_jax.topologies.auto import Auto
from dynamiq_jax.topologies.base import Topology
from dynamiq_jax.topologies.butterfly import Butterfly
from dynamiq_jax.topologies.cost_model import CodecSpeed, Network
from dynamiq_jax.topologies.ring import Ring

TOPOLOGIES: dict[str, type[Topology | Auto]] = {
    "auto": Auto,
    "ring": Ring,
    "butterfly": Butterfly,
    "all_to_all": AllToAll,
}

__all__ = [
    "TOPOLOGIES",
    "AllToAll",
    "Auto",
    "Butterfly",
    "CodecSpeed",
    "Network",
    "Ring",
    "Topology",
    "resolve_topology",
]


def resolve_topology(topology: Topology | Auto | str) -> Topology | Auto:
    """A topology as given, or the default one of a name in `TOPOLOGIES`."""
    if isinstance(topology, Topology | Auto):
        return topology
    if isinstance(topology, str) and topology in TOPOLOGIES:
        return TOPOLOGIES[topology]()
    raise ValueError(f"topology={topology!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
