"""An island of several devices, and of several processes, for test_shards.py."""

import fsspec
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dynamiq_jax.islands import Islands, ObjectStore, SharedFolder
from dynamiq_jax.islands._state import hash_of_state
from tests.support.gradients import heavy_tailed

SHAPES = {"w": (64, 48), "v": (96, 8), "b": (24,)}
SPECS = {"w": P("data", None), "v": P("data"), "b": P()}


def store(place: str) -> SharedFolder | ObjectStore:
    """The store of a run: a folder, or a folder of a bucket behind the URL of a server of S3."""
    if "://" not in place:
        return SharedFolder(place)
    url, _, path = place.rpartition("/")
    filesystem = fsspec.filesystem("s3", endpoint_url=url, key="a", secret="b")
    return ObjectStore(filesystem, f"bucket/{path}")


def train(rank: int, place: str, name: str, rounds: int, ahead: bool):
    """Take rounds, each with a drawn change: the last round, the hash, and own shards by name."""
    mesh = jax.make_mesh((4,), ("data",))
    places = {leaf: NamedSharding(mesh, spec) for leaf, spec in SPECS.items()}

    def drawn(seed: int):
        values = {leaf: heavy_tailed(seed, shape) for leaf, shape in SHAPES.items()}
        return {
            leaf: jax.make_array_from_callback(v.shape, places[leaf], v.__getitem__)
            for leaf, v in values.items()
        }

    islands = Islands(
        transport=store(place),
        name=name,
        count=2,
        deadline=100.0,
        method="dynamiq:4",
        feedback=True,
        store_every=2,
        outer=optax.sgd(0.7, momentum=0.9),
    )
    state = islands.join(drawn(0))
    move = jax.jit(lambda tree, change: jax.tree.map(lambda a, b: a + 0.01 * b, tree, change))
    params, exchange = state.reference, None
    for number in range(rounds):
        params = move(params, drawn(100 * number + ord(name)))
        if exchange is not None:
            state = exchange.result()
        if ahead:
            exchange = islands.start_exchange(params, state)
            params = exchange.params
        else:
            state = islands.exchange(params, state)
            params = state.reference
    if exchange is not None:
        state = exchange.result()
    found = {}
    for leaf, array in (state.reference | {"left": state.residual["w"]}).items():
        for shard in array.addressable_shards:
            found[name, leaf, str(shard.index)] = np.asarray(shard.data)
    return state.round, hash_of_state(state), found
