"""Topologies: how chunks travel. A new one is a file here and a line in `TOPOLOGIES`."""

from dynamiq_jax.topologies.base import Topology
from dynamiq_jax.topologies.ring import Ring

TOPOLOGIES: dict[str, type[Topology]] = {
    "ring": Ring,
}

__all__ = ["TOPOLOGIES", "Ring", "Topology", "resolve_topology"]


def resolve_topology(topology: Topology | str) -> Topology:
    """A topology as given, or the default one of a name in `TOPOLOGIES`."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and topology in TOPOLOGIES:
        return TOPOLOGIES[topology]()
    raise ValueError(f"topology={topology!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
