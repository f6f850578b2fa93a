"""Further steps of one global program: training as people do it, on one axis of workers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops
from jax import lax

from tests.compress.global_forms import (
    MATRICES,
    OF_MATRICES,
    VOCABULARY,
    Step,
    X,
    Y,
    cross_entropy,
    form,
    labels,
    normal,
    on_matrices,
    output,
    replicated,
    squares,
    updated,
    variables,
)


@form(*OF_MATRICES)
def accumulated_in_a_scan(place):
    """Micro-batches whose gradients are one message."""

    def step(params, x, y):
        def micro(total, xy):
            loss, gradients = jax.value_and_grad(squares)(params, *xy)
            return jax.tree.map(lambda a, b: a + b / 2, total, (loss, gradients)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, gradients), _ = lax.scan(micro, zeros, (x, y))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    batch = place.put((X.reshape(2, 8, -1), Y.reshape(2, 8, -1)), None, "data")
    return Step(step, place.put(MATRICES), batch)


EXPERTS = {
    "router": normal(32, 4, scale=0.3),
    "up": normal(4, 32, 16, scale=0.2),
    "down": normal(4, 16, 16, scale=0.2),
}
OF_EXPERTS = [(4, 32, 16), (4, 16, 16)]


def balance(gates, chosen):
    """Loss of a router, from means over the whole batch."""
    return gates.shape[-1] * jnp.sum(gates.mean(0) * chosen.mean(0))


@form(*OF_EXPERTS)
def mixture_of_experts(place):
    """All experts for all rows, and a loss of the router over the whole batch."""

    def loss(params, x, y):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
        hidden = jax.nn.relu(jnp.einsum("bd,edf->bef", x, params["up"]))
        outputs = jnp.einsum("bef,efo,be->bo", hidden, params["down"], gates * chosen)
        return jnp.mean((outputs - y) ** 2) + 0.01 * balance(gates, chosen)

    return on_matrices(place, loss, params=EXPERTS)


@form(*OF_EXPERTS, explicit=False, only_sums=False)
def sorted_mixture_of_experts(place):
    """Rows sorted by their experts, which multiply them group by group."""

    def loss(params, x, y):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jnp.argmax(gates, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.sum(jax.nn.one_hot(chosen, 4, dtype=jnp.int32), 0)
        rows = x.at[order].get(out_sharding=place.out("data"))
        hidden = jax.nn.relu(lax.ragged_dot(rows, params["up"], sizes))
        outputs = lax.ragged_dot(hidden, params["down"], sizes)
        back = outputs.at[jnp.argsort(order)].get(out_sharding=place.out("data"))
        gate = jnp.sum(gates * jax.nn.one_hot(chosen, 4), -1, keepdims=True)
        return jnp.mean((back * gate - y) ** 2)

    return on_matrices(place, loss, params=EXPERTS)


@form((32, 16), (16, 16), tolerance=1e-3)
def lora_with_scaled_losses(place):
    """Adapters of bfloat16 beside a frozen matrix, and an update only where all is finite."""
    frozen = place.put(normal(32, 16, scale=0.2).astype(jnp.bfloat16))
    adapters = {"a": normal(32, 16, scale=0.2), "b": jnp.zeros((16, 16))}
    tx = optax.adam(1e-2)

    def step(state, x, y):
        adapters, optimizer, scale = state

        def loss_fn(adapters):
            a, b = (adapters[name].astype(jnp.bfloat16) for name in "ab")
            outputs = x.astype(jnp.bfloat16) @ frozen + x.astype(jnp.bfloat16) @ a @ b
            return jnp.mean((outputs.astype(jnp.float32) - y) ** 2) * scale

        loss, gradients = jax.value_and_grad(loss_fn)(adapters)
        gradients = jax.tree.map(lambda g: g / scale, gradients)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
        new = updated(tx, gradients, optimizer, adapters)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (adapters, optimizer))
        return (*new, jnp.where(finite, scale, scale / 2)), loss / scale

    return Step(step, replicated(place, adapters, tx, jnp.float32(128)), place.put((X, Y), "data"))


def with_optimizer(place, tx, loss=squares, params=MATRICES, batch=(X, Y)):
    def step(state, *batch):
        params, optimizer = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return updated(tx, gradients, optimizer, params), value

    return Step(step, replicated(place, params, tx), place.put(batch, "data"))


@form(*OF_MATRICES)
def muon(place):
    """Products of matrices in the optimizer, which contract no rows of the batch."""
    return with_optimizer(place, optax.contrib.muon(1e-2))


@form(*OF_MATRICES, *OF_MATRICES, groups=2)
def two_losses_and_two_optimizers(place):
    """Two networks, of which the second learns from the result of the first one's update."""
    first, second = optax.adam(1e-2), optax.sgd(0.1, momentum=0.9)

    def step(state, x, y):
        params, optimizer, critic, of_critic = state
        loss, gradients = jax.value_and_grad(squares)(params, x, y)
        params, optimizer = updated(first, gradients, optimizer, params)
        error, gradients = jax.value_and_grad(squares)(critic, x, output(params, x) - y)
        critic, of_critic = updated(second, gradients, of_critic, critic)
        return (params, optimizer, critic, of_critic), loss + error

    state = MATRICES, first.init(MATRICES), MATRICES, second.init(MATRICES)
    return Step(step, place.put(state), place.put((X, Y), "data"))


@form(*OF_MATRICES, (16, 16))
def contrastive(place):
    """Each row against all others: products of all rows stay exact in the backward pass."""

    def loss(params, x, y):
        a, b = output(params, x), y @ params["other"]
        a = a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True))
        all_of_b = place.constrain(b, None) if place.is_explicit else b
        logs = jax.nn.log_softmax(jnp.einsum("bk,ck->bc", a, all_of_b))
        return -jnp.mean(jnp.sum(logs * place.constrain(jnp.eye(16), "data"), -1))

    return on_matrices(place, loss, params={**MATRICES, "other": normal(16, 16)})


@form(*OF_MATRICES, explicit=False, only_sums=False)
def two_views(place):
    """Two views of each row as one batch, whose halves are compared."""

    def loss(params, x, y):
        first, second = jnp.split(output(params, jnp.concatenate([x, jnp.sin(x)])), 2)
        return jnp.mean((first - y) ** 2) + jnp.mean((first - second) ** 2)

    return on_matrices(place, loss)


@form(*OF_MATRICES)
def mean_of_outputs(place):
    """The gradient of the last product is the same for all rows."""
    return on_matrices(place, lambda params, x, y: 0.1 * jnp.mean(output(params, x)))


class Rounded(nn.Module):
    """Products of eight bits, whose histories travel as gradients."""

    @nn.compact
    def __call__(self, x):
        dots = {"dot_general_cls": fp8_ops.Fp8DotGeneralOp}
        x = nn.Dense(32, use_bias=False, **dots)(x)
        return nn.Dense(16, use_bias=False, **dots)(jnp.tanh(x))


@form((32, 32), (32, 16))
def eight_bit_products(place):
    model = Rounded()
    values = jax.jit(model.init)(jax.random.key(0), X)

    def step(state, x, y):
        loss, gradients = jax.value_and_grad(
            lambda state: jnp.mean((model.apply(state, x) - y) ** 2)
        )(state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients["params"])
        return {**gradients, "params": params}, loss

    return Step(step, place.put(values), place.put((X, Y), "data"))


TABLE = {"table": normal(VOCABULARY, 32), "w": normal(32, VOCABULARY, scale=0.2)}


@form((64, 32), (32, 64), explicit=False)
def embedding_along_an_axis(place):
    def loss(params, tokens, targets):
        x = jnp.take_along_axis(params["table"], tokens.reshape(-1, 1), axis=0)
        logs = jax.nn.log_softmax(jnp.tanh(x) @ params["w"])
        return -jnp.mean(jnp.take_along_axis(logs, targets.reshape(-1, 1), axis=1))

    batch = labels(16, 4, below=VOCABULARY), labels(16, 4, below=VOCABULARY)
    return on_matrices(place, loss, batch, TABLE)


class Convolutions(nn.Module):
    """Strided and depthwise convolutions with group norm."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(32, (3, 3), strides=(2, 2), use_bias=False)(x)
        x = nn.relu(nn.GroupNorm(4)(x))
        x = nn.Conv(32, (3, 3), feature_group_count=32, use_bias=False)(x)
        x = nn.Conv(32, (1, 1), use_bias=False)(jax.nn.relu(x))
        return nn.Dense(10)(x.mean((1, 2)))


@form((3, 3, 3, 32), (3, 3, 1, 32), (1, 1, 32, 32), (32, 10))
def depthwise_and_strided_convolutions(place):
    model, x, y = Convolutions(), normal(8, 8, 8, 3), labels(8, below=10)
    loss = lambda params, x, y: cross_entropy(model.apply(params, x), y)  # noqa: E731
    return with_optimizer(place, optax.sgd(0.1), loss, variables(model, x), (x, y))


@form(*OF_MATRICES)
def steps_while_the_loss_falls(place):
    step = on_matrices(place).step

    def steps(params, x, y):
        def one(carry):
            params, _, count = carry
            params, loss = step(params, x, y)
            return params, loss, count + 1

        first = params, jnp.float32(9), jnp.int32(0)
        params, loss, _ = lax.while_loop(lambda c: (c[1] > 0.01) & (c[2] < 3), one, first)
        return params, loss

    return Step(steps, place.put(MATRICES), place.put((X, Y), "data"))


@form(*OF_MATRICES, *OF_MATRICES, groups=2)
def one_of_two_steps(place):
    """A `cond` on a number in the state, both of whose branches sum."""
    step = on_matrices(place).step
    other = on_matrices(place, lambda *args: 3 * squares(*args)).step

    def chosen(state, x, y):
        params, count = state
        params, loss = lax.cond(count % 2 == 0, step, other, params, x, y)
        return (params, count + 1), loss

    return Step(chosen, place.put((MATRICES, jnp.int32(0))), place.put((X, Y), "data"))


@form((32, 32), explicit=False)
def rows_that_are_not_shared_evenly(place):
    """A contraction over other rows than those of the workers' shares is the compiler's."""

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["w"])
        halves = hidden.reshape(2, 8, -1)[:, :3].reshape(6, -1)  # six rows for four workers
        return jnp.mean((halves @ params["v"] - y[:6]) ** 2)

    return on_matrices(place, loss)
