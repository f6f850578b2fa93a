"""PyTorch DDP (pytorch#75666): hooks with a state could not be pickled for a checkpoint."""

import copy
import pickle

import jax
import jax.numpy as jnp

import dynamiq_jax as dq
from dynamiq_jax import islands
from dynamiq_jax.methods import METHODS
from dynamiq_jax.topologies import TOPOLOGIES

tree = {"w": jnp.ones((64, 64))}
objects = [
    *(METHODS[name]() for name in METHODS),
    *(topology() for topology in TOPOLOGIES.values()),
    dq.Compression(max_error=0.1),
    dq.Schedule({0: "exact", 5: "dynamiq:5"}),
    dq.wire_report(tree, 4, method={".*": "dynamiq:4"}),
    islands.encode(tree, key=jax.random.key(0), method="bf16"),
    dq.all_reduce_gradients("data").init(tree),
]
for thing in objects:
    for again in (copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))):
        assert again == thing, thing
