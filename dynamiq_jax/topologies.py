"""Topologies, which carry chunks, and the parts that a topology of your own is made of."""

from dynamiq_jax._core.axis import Axis
from dynamiq_jax._topologies import TOPOLOGIES, resolve_topology
from dynamiq_jax._topologies.all_to_all import AllToAll
from dynamiq_jax._topologies.auto import Auto
from dynamiq_jax._topologies.base import Arrival, Choice, FixedTopology, Topology
from dynamiq_jax._topologies.butterfly import Butterfly
from dynamiq_jax._topologies.cost_model import CodecSpeed, Network
from dynamiq_jax._topologies.ring import Ring

__all__ = [
    "TOPOLOGIES",
    "AllToAll",
    "Arrival",
    "Auto",
    "Axis",
    "Butterfly",
    "Choice",
    "CodecSpeed",
    "FixedTopology",
    "Network",
    "Ring",
    "Topology",
    "resolve_topology",
]
