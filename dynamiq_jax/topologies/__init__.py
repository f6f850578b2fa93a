"""Topologies: routes of chunks. A new one takes one file here and one line in `TOPOLOGIES`."""

from dynamiq_jax._core import naming
from dynamiq_jax.topologies._all_to_all import AllToAll
from dynamiq_jax.topologies._base import Arrival, Gathered, Scattered, Topology, gather
from dynamiq_jax.topologies._butterfly import Butterfly
from dynamiq_jax.topologies._ring import Ring

__all__ = ["TOPOLOGIES", "AllToAll", "Arrival", "Butterfly", "Gathered", "Ring", "Scattered"]
__all__ += ["Topology", "gather", "resolve_topology"]

# Names are those of the literature in lower case, with spaces and hyphens as underscores.
TOPOLOGIES: dict[str, type[Topology]] = {
    "ring": Ring,
    "butterfly": Butterfly,
    "all_to_all": AllToAll,
}


def resolve_topology(topology: Topology | str) -> Topology:
    """Return a topology as given, or the topology of a name: "ring", "ring:unroll=True".

    Args:
      topology: topology, or its name with fields.

    Raises:
      ValueError: another value, or an unknown name.
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and naming.head(topology) in TOPOLOGIES:
        return naming.make("topology", topology, TOPOLOGIES)
    raise ValueError(f"topology={topology!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
