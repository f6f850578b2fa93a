"""How chunks travel. A new topology is one file here and one line in `TOPOLOGIES`.

base        interface of a topology
ring, butterfly, all_to_all
cost_model  prediction of the time of an all-reduce
auto        choice by the cost model
"""

from dynamiq_jax._core import naming
from dynamiq_jax._topologies.all_to_all import AllToAll
from dynamiq_jax._topologies.auto import Auto
from dynamiq_jax._topologies.base import Topology
from dynamiq_jax._topologies.butterfly import Butterfly
from dynamiq_jax._topologies.ring import Ring

# Names are those of the literature in lower case, with spaces and hyphens as underscores.
TOPOLOGIES: dict[str, type[Topology]] = {
    "auto": Auto,
    "ring": Ring,
    "butterfly": Butterfly,
    "all_to_all": AllToAll,
}


def resolve_topology(topology: Topology | str) -> Topology:
    """Return a topology as given, or the one of a name: "ring", "ring:unroll=True".

    Raises:
      ValueError: the name is not known, or an option is not possible.
    """
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, str) and naming.head(topology) in TOPOLOGIES:
        return naming.make("topology", topology, TOPOLOGIES)
    raise ValueError(f"topology={topology!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
