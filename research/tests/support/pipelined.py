"""Training of a small model with pipelined steps on a mesh, and ordinary training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import dynamiq_jax as dq
from dynamiq_jax.topologies import Ring
from dynamiq_research import Pipelined, PipelinedState
from tests.support.workers import STOCHASTIC

WORKERS, ROWS, WIDTH = 4, 4, 32
LAYERS = ("1", "2", "3")
BUCKETS = dq.Compression(
    topology=Ring(unroll=True), bucket_bytes=4 * WIDTH * WIDTH, bucketing="in_order"
)  # one for each matrix; biases stay exact
NORM_BYTES = 4 * 2 * (WORKERS - 1) / WORKERS


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Allow an optimizer to mix dtypes, as those of optax do."""

    def update(*args):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*args)

    return optax.GradientTransformation(optimizer.init, update)


ADAMW = lenient(optax.adamw(1e-2))
CLIPPED_SGD = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.5))


def start() -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: {
            "b": np.zeros(WIDTH, np.float32),
            "w": (rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32),
        }
        for name in LAYERS
    }


def batches(steps: int, workers: int = WORKERS) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(workers * ROWS, WIDTH)).astype(np.float32) for _ in range(steps)]


def loss_fn(params, x):
    y = x
    for name in LAYERS:
        y = y + jnp.tanh(y @ params[name]["w"] + params[name]["b"][None, :])
    return jnp.mean((y - jnp.flip(x, 1)) ** 2)


class Run:
    """Training on a mesh: pipelined, and with both halves at the end of a step."""

    def __init__(self, mesh, *, method=STOCHASTIC, optimizer=ADAMW, options=BUCKETS, **fields):
        axes = mesh.axis_names
        self.pipelined = Pipelined(
            optimizer=optimizer,
            axis_name=axes if len(axes) > 1 else axes[0],
            method=dataclasses.replace(options, method=method),
            **fields,
        )
        of_state, rows = self.pipelined.state_specs, P(axes)
        mapped = functools.partial(jax.shard_map, mesh=mesh)
        self.init = jax.jit(mapped(self.pipelined.init, in_specs=P(), out_specs=of_state))
        self.gather = jax.jit(mapped(self.pipelined.gather, in_specs=(of_state,), out_specs=P()))
        self.resume = jax.jit(mapped(self.pipelined.resume, in_specs=(P(),), out_specs=of_state))

        def backward(updated, x):
            own = lax.pcast(updated.params, axes, to="varying")
            loss, grads = jax.value_and_grad(loss_fn)(own, x)
            return self.pipelined.scatter(grads, updated), lax.pmean(loss, axes)

        @jax.jit
        @mapped(in_specs=(of_state, rows), out_specs=(of_state, P()))
        def step(state, x):
            return backward(self.pipelined.gather(state), x)

        @jax.jit
        @mapped(in_specs=(P(), rows), out_specs=(P(), P()))
        def unpipelined_step(updated, x):
            state, loss = backward(updated, x)
            return self.pipelined.gather(state), loss

        self.step, self.unpipelined_step = step, unpipelined_step

    def begin(self) -> PipelinedState:
        return self.init(start())

    def train(self, state, batches):
        losses = []
        for x in batches:
            state, loss = self.step(state, x)
            losses.append(np.asarray(loss))
        return state, losses


def oracle(batches, optimizer, workers=WORKERS):
    """Losses, parameters and norms of mean gradients of ordinary training."""
    params = start()
    state, losses, norms = optimizer.init(params), [], []
    gradient = jax.jit(jax.value_and_grad(loss_fn))
    for x in batches:
        each = [gradient(params, rows) for rows in np.split(x, workers)]
        losses.append(np.mean([loss for loss, _ in each]))
        grads = jax.tree.map(lambda *leaves: sum(leaves) / workers, *(g for _, g in each))
        norms.append(global_norm(grads))
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return losses, params, norms


def global_norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a, b) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), a, b)
