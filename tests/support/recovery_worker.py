"""One process of test_recovery.py."""

import os
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.topologies import Ring
from tests.support.workers import STOCHASTIC, mesh_of

NUM_PROCESSES, NUM_STEPS, FAULTY_STEP = 2, 6, 3
INPUTS, OUTPUTS, BATCH = 64, 96, 16


class Halfway:
    """Called by every all-reduce; one of them may be the process's last."""

    def __init__(self, fault: str):
        self.fault, self.step = fault, 0

    def __call__(self, payload):
        if self.fault != "none" and self.step == FAULTY_STEP:
            os.kill(os.getpid(), signal.Signals[self.fault])
        return np.asarray(payload)


def ring_through(halfway: Halfway) -> Ring:
    """A ring that calls `halfway` when chunks have been summed, before the sums are gathered."""

    class RingThrough(Ring):
        def summed(self, codec, axis):
            def through(leaf):
                same = io_callback(halfway, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf)
                return jax.lax.pcast(same, axis.name, to="varying")

            return jax.tree.map(through, super().summed(codec, axis))

    return RingThrough()


def make_step(optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """(parameters and optimizer state, x, y) to the former after one step."""

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)

    def local(tree, x, y):
        params = tree["params"]
        grads = jax.grad(loss)(jax.lax.pcast(params, "data", to="varying"), x, y)
        updates, state = optimizer.update(grads, tree["optimizer"], params)
        return {"params": optax.apply_updates(params, updates), "optimizer": state}

    specs = P(), P("data"), P("data")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))


def train(rank: int, folder: pathlib.Path, fault: str) -> dict[str, np.ndarray]:
    """Train a small model over two processes, from the last checkpoint in a folder if there is one.

    `fault` names a signal that this process sends itself in the middle of an all-reduce, or is
    "none".
    """
    mesh = mesh_of(data=NUM_PROCESSES)
    replicated, split = (jax.NamedSharding(mesh, spec) for spec in (P(), P("data")))
    halfway = Halfway(fault)
    optimizer = optax.chain(
        dq.all_reduce_gradients("data", method=dq.Compression(STOCHASTIC, ring_through(halfway))),
        optax.adam(1e-2),
    )
    step = make_step(optimizer, mesh)

    def start():
        params = {"w": jnp.zeros((INPUTS, OUTPUTS))}
        return {"params": params, "optimizer": optimizer.init(params)}

    def trained(tree, first, save=lambda index, tree: None):
        for index in range(first, NUM_STEPS):
            halfway.step = index
            random = np.random.default_rng((index, rank))
            batch = [
                random.standard_normal((BATCH, width)).astype(np.float32)
                for width in (INPUTS, OUTPUTS)
            ]
            tree = step(tree, *(jax.make_array_from_process_local_data(split, a) for a in batch))
            save(index + 1, jax.block_until_ready(tree))
        return tree

    first = max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0)
    tree = fresh = jax.jit(start, out_shardings=replicated)()
    with ocp.StandardCheckpointer() as checkpointer:

        def save(index, tree):
            checkpointer.save(folder / str(index), tree)
            checkpointer.wait_until_finished()

        if first:
            tree = checkpointer.restore(folder / str(first), fresh)
        end = trained(tree, first, save)
    # A control: everything as restored, but for the all-reduce's own state.
    forgetful = trained(
        {**tree, "optimizer": (fresh["optimizer"][0], *tree["optimizer"][1:])}, first
    )
    leaves = {f"leaf {number}": leaf for number, leaf in enumerate(jax.tree.leaves(end))}
    found = {"params": end["params"]["w"], "forgetful": forgetful["params"]["w"]}
    return {name: np.asarray(leaf) for name, leaf in (leaves | found | {"first": first}).items()}
