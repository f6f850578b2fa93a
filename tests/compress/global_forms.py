"""Train steps of one global program, which the compiler partitions. None knows of compression."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import fp8_ops
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DATA = {"data": 4}
SEED = np.random.default_rng(7)


@dataclasses.dataclass(frozen=True)
class Place:
    """Mesh on which a step runs."""

    mesh: Mesh

    @property
    def is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def put(self, tree, *spec, specs=None):
        """Arrays with one spec, or with those of a function of the path of a leaf."""
        if specs is None:
            return jax.device_put(tree, NamedSharding(self.mesh, P(*spec)))
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: self.put(leaf, *specs(jax.tree_util.keystr(path), leaf)), tree
        )

    def sharding(self, *spec):
        return NamedSharding(self.mesh, P(*spec))

    def out(self, *spec):
        """What explicit axes ask for where a result could lie in several ways."""
        return self.sharding(*spec) if self.is_explicit else None

    def constrain(self, value, *spec):
        place = jax.sharding.reshard if self.is_explicit else lax.with_sharding_constraint
        return place(value, self.sharding(*spec))


@dataclasses.dataclass(frozen=True)
class Step:
    """Step from a state and a batch to the next state and a loss."""

    step: Callable[..., Any]
    state: Any
    batch: tuple[Any, ...]
    jit: Callable[..., Any] = jax.jit  # of the package that the step is written for

    def jitted(self) -> Callable[..., Any]:
        """The step as its authors run it."""
        return self.jit(self.step)


Shapes = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Form:
    """Step on a mesh, and what has to be seen of it."""

    make: Callable[[Place], Step]
    compressed: Shapes  # of all sums that are compressed, in any order
    axes: Mapping[str, int]
    groups: int = 1
    explicit: bool = True  # whether JAX takes it with explicit axes
    only_sums: bool = True  # over the workers' axis; False: rows or parameters travel, too
    tolerance: float = 1e-5  # relative, of losses with exact sums

    def runs_on(self, kind: str) -> bool:
        return kind == "automatic" or self.explicit

    def mesh(self, axis_type: AxisType) -> Mesh:
        sizes = tuple(self.axes.values())
        devices = jax.devices()[: int(np.prod(sizes))]
        return jax.make_mesh(
            sizes, tuple(self.axes), axis_types=(axis_type,) * len(sizes), devices=devices
        )


FORMS: dict[str, Form] = {}


def form(*compressed: tuple[int, ...], axes: Mapping[str, int] = DATA, **fields: Any):
    def registered(make: Callable[[Place], Step]) -> Callable[[Place], Step]:
        FORMS[make.__name__] = Form(make, list(compressed), axes, **fields)
        return make

    return registered


def normal(*shape: int, scale: float = 1.0) -> Array:
    """NumPy draws them without compiling a program."""
    return jnp.asarray(np.random.default_rng(shape).normal(0, scale, shape), jnp.float32)


def labels(*shape: int, below: int) -> Array:
    return jnp.asarray(np.random.default_rng(shape).integers(0, below, shape), jnp.int32)


def variables(model: nn.Module, *args: Any) -> Any:
    """Variables of a model, drawn by NumPy: scales are one, other vectors zero."""

    def draw(path: Any, leaf: Any) -> Array:
        if "scale" in jax.tree_util.keystr(path) or "var" in jax.tree_util.keystr(path):
            return jnp.ones(leaf.shape, leaf.dtype)
        if len(leaf.shape) < 2:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return normal(*leaf.shape, scale=float(np.prod(leaf.shape[:-1])) ** -0.5).astype(leaf.dtype)

    shapes = jax.eval_shape(model.init, jax.random.key(0), *args)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def replicated(place: Place, params: Any, tx: optax.GradientTransformation, *more: Any) -> Any:
    return place.put((params, tx.init(params), *more))


def updated(tx: optax.GradientTransformation, gradients: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


X, Y = normal(16, 32), normal(16, 16)
MATRICES = {"w": normal(32, 32, scale=1 / 6), "v": normal(32, 16, scale=1 / 6)}
OF_MATRICES = [(32, 32), (32, 16)]


def output(params: Any, x: Array) -> Array:
    return jnp.tanh(x @ params["w"]) @ params["v"]


def squares(params: Any, x: Array, y: Array) -> Array:
    return jnp.mean((output(params, x) - y) ** 2)


def on_matrices(
    place: Place, loss: Callable[..., Array] = squares, batch: Any = (X, Y), params: Any = MATRICES
) -> Step:
    def step(params, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return Step(step, place.put(params), place.put(tuple(batch), "data"))


@form((32, 64), (64, 16))
def linen_mlp(place):
    """Flax with layer norm, clipping and adamw."""
    model = nn.Sequential([nn.Dense(64), nn.gelu, nn.LayerNorm(), nn.Dense(16)])
    params, tx = variables(model, X), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state, x, y):
        params, optimizer = state
        loss, gradients = jax.value_and_grad(
            lambda params: jnp.mean((model.apply(params, x) - y) ** 2)
        )(params)
        return updated(tx, gradients, optimizer, params), loss

    return Step(step, replicated(place, params, tx), place.put((X, Y), "data"))


class ConvNet(nn.Module):
    """Convolutions with a norm."""

    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def with_statistics(place: Place, model: nn.Module, x: Array, y: Array) -> Step:
    values, tx = variables(model, x), optax.sgd(0.1, momentum=0.9)
    params, statistics = values["params"], values["batch_stats"]

    def step(state, x, y):
        params, optimizer, statistics = state

        def loss_fn(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"]
            )
            losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1]))
            return losses.mean(), new["batch_stats"]

        (loss, new), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return (*updated(tx, gradients, optimizer, params), new), loss

    return Step(step, replicated(place, params, tx, statistics), place.put((x, y), "data"))


@form((3, 3, 8, 16), (256, 10))
def cnn_with_batch_norm(place):
    return with_statistics(place, ConvNet(), normal(8, 16, 16, 3), labels(8, below=10))


class WideNorm(nn.Module):
    """Statistics as large as a matrix."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(2048)(x)
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(x))


@form((32, 2048), (2048, 4), (2048,), (2048,))
def batch_norm_of_2048_channels(place):
    """The statistics stay exact, and the gradients of scale and bias are sent."""
    return with_statistics(place, WideNorm(), X, labels(16, below=4))


VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 2, 2, 8


def norm(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal attention of [batch, length, heads, width of a head]."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    length = q.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)


def decoder_params() -> Any:
    layers, width, of_head = LAYERS, WIDTH, WIDTH // HEADS
    return {
        "embedding": normal(VOCABULARY, width, scale=0.1),
        "norm": jnp.ones(width),
        "layers": {
            "norms": jnp.ones((layers, 2, width)),
            "qkv": normal(layers, width, 3, HEADS, of_head, scale=0.1),
            "out": normal(layers, HEADS, of_head, width, scale=0.1),
            "up": normal(layers, width, 4 * width, scale=0.1),
            "down": normal(layers, 4 * width, width, scale=0.1),
        },
    }


def block(
    x: Array, layer: Any, attend: Callable[..., Array] = attention, between: Any = lambda x: x
) -> Array:
    h = norm(x, layer["norms"][0])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, layer["qkv"][:, i]) for i in range(3))
    x = between(x + jnp.einsum("bthk,hkd->btd", attend(q, k, v), layer["out"]))
    h = norm(x, layer["norms"][1])
    return between(x + jax.nn.gelu(h @ layer["up"]) @ layer["down"])


def decoder_loss(
    params: Any,
    tokens: Array,
    place: Place,
    *,
    scan: bool = True,
    remat: bool = True,
    spec: Any = ("data",),
    **how: Any,
) -> Array:
    x = params["embedding"].at[tokens[:, :-1]].get(out_sharding=place.out(*spec))
    one = functools.partial(block, **how)
    one = jax.checkpoint(one) if remat else one
    if scan:
        x, _ = lax.scan(lambda x, layer: (one(x, layer), None), x, params["layers"])
    else:
        for i in range(LAYERS):
            x = one(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))
    logits = norm(x, params["norm"]) @ params["embedding"].T
    return cross_entropy(logits, tokens[:, 1:])


def cross_entropy(logits: Array, targets: Array) -> Array:
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.sum(logs * jax.nn.one_hot(targets, logs.shape[-1]), -1))


TOKENS = labels(8, LENGTH + 1, below=VOCABULARY)
OF_LAYERS = [(2, 32, 3, 2, 16), (2, 2, 16, 32), (2, 32, 128), (2, 128, 32)]
OF_DECODER = [*OF_LAYERS, (64, 32)]


def decoder(place: Place, tokens: Array = TOKENS, params: Any = None, **how: Any) -> Step:
    params, tx = decoder_params(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(state, tokens):
        params, optimizer = state
        loss, gradients = jax.value_and_grad(decoder_loss)(params, tokens, place, **how)
        return updated(tx, gradients, optimizer, params), loss

    return Step(step, replicated(place, params, tx), (place.put(tokens, "data"),))


@form(*OF_DECODER)
def decoder_in_a_scan(place):
    """Recomputed layers in a scan, and one matrix for embedding and head."""
    return decoder(place)


@form(*2 * [shape[1:] for shape in OF_LAYERS[1:]], *6 * [(32, 2, 16)], (64, 32))
def decoder_unrolled(place):
    return decoder(place, scan=False, remat=False)


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


@form(*OF_MATRICES)
def accumulated_by_a_loop_of_python(place):
    """Micro-batches whose total begins with zeros."""

    def step(params, x, y):
        loss, gradients = 0.0, jax.tree.map(jnp.zeros_like, params)
        for each in zip(x, y, strict=True):
            one = jax.value_and_grad(squares)(params, *each)
            loss, gradients = jax.tree.map(lambda a, b: a + b / 2, (loss, gradients), one)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    batch = place.put((X.reshape(2, 8, -1), Y.reshape(2, 8, -1)), None, "data")
    return Step(step, place.put(MATRICES), batch)


@form(*OF_MATRICES, (32, 32), (64, 32), explicit=False)
def times_that_all_workers_have(place):
    """A table and a matrix for times of diffusion, which are drawn in the step."""
    more = {"of_times": normal(32, 32, scale=0.2), "table": normal(VOCABULARY, 32, scale=0.2)}

    def loss(params, x, y):
        times = jax.random.randint(jax.random.key(3), x.shape[:1], 0, VOCABULARY)
        waves = jnp.sin(times[:, None] / jnp.arange(1.0, 33.0))
        hidden = x @ params["w"] + waves @ params["of_times"] + params["table"][times]
        return jnp.mean((jnp.tanh(hidden) @ params["v"] - y) ** 2)

    return on_matrices(place, loss, params={**MATRICES, **more})


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
