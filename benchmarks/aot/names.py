"""Topologies by name."""

import dataclasses

from dynamiq_jax.topologies import TOPOLOGIES, Topology


def topology_of(name: str) -> Topology:
    """A topology by its name, with options that are to be True after colons: ring:bidirectional."""
    kind, *options = name.split(":")
    if kind not in TOPOLOGIES:
        raise SystemExit(f"topology {kind!r} is not known. Give one of {sorted(TOPOLOGIES)}.")
    known = [field.name for field in dataclasses.fields(TOPOLOGIES[kind])]
    if unknown := set(options) - set(known):
        raise SystemExit(f"topology {kind!r} has no option {unknown.pop()!r}. It has {known}.")
    return TOPOLOGIES[kind](**dict.fromkeys(options, True))
