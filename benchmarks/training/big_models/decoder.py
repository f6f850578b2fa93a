"""A decoder with the shapes of Llama 3 8B, and its training step on a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dynamiq_jax as dq

P = PartitionSpec
WIDTH, HIDDEN, VOCABULARY = 4096, 14336, 128_256
HEADS, GROUPS, HEAD_SIZE = 32, 8, 128
TOKENS = 2048  # of a row; every device has one row

# The step of global arrays, which the compiler partitions, and that of a worker.
FORMS = ("exact", "compress", "exact in a map", "pmean in a map")

SPECS = {
    "embed": P("fsdp"),
    "head": P(None, "fsdp"),
    "norm": P(),
    "layers": {
        **dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "fsdp")),
        **dict.fromkeys(("out", "down"), P(None, None, "fsdp")),
        **dict.fromkeys(("first_norm", "second_norm"), P()),
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A training step: how gradients are summed, layers, and devices of data x fsdp."""

    form: str  # of FORMS
    layers: int
    devices: tuple[int, int]

    def lower(self) -> Any:
        """Lower the training step for virtual devices."""
        mesh = jax.make_mesh(self.devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
        rows = NamedSharding(mesh, P(("data", "fsdp")))
        step: Any = jax.jit(
            _step(_gradients(self.form, mesh)),
            in_shardings=(placed, placed, rows),
            out_shardings=(placed, placed, None),
            donate_argnums=(0, 1),
        )
        if self.form == "compress":
            step = dq.compress(step, "data")
        tokens = jax.ShapeDtypeStruct((mesh.size, TOKENS + 1), jnp.int32)
        return step.lower(shapes(self.layers), shapes(self.layers), tokens)


def shapes(layers: int) -> Any:
    """Return the parameters as shapes and dtypes."""
    of_layer = {
        "query": (WIDTH, HEADS * HEAD_SIZE),
        "key": (WIDTH, GROUPS * HEAD_SIZE),
        "value": (WIDTH, GROUPS * HEAD_SIZE),
        "out": (HEADS * HEAD_SIZE, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "first_norm": (WIDTH,),
        "second_norm": (WIDTH,),
    }
    tree = {
        "embed": (VOCABULARY, WIDTH),
        "head": (WIDTH, VOCABULARY),
        "norm": (WIDTH,),
        "layers": {name: (layers, *shape) for name, shape in of_layer.items()},
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


def loss_fn(params: Any, tokens: Array) -> Array:
    """Return the mean cross entropy of the next tokens.

    Args:
      params: as `shapes`.
      tokens: int32 [rows, tokens + 1].
    """

    def body(x: Array, weights: Any) -> tuple[Array, None]:
        return _layer(x, weights), None

    x = jnp.take(params["embed"], tokens[:, :-1], axis=0).astype(jnp.bfloat16)
    x, _ = lax.scan(jax.checkpoint(body), x, params["layers"])
    logits = rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype)
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def _layer(x: Array, weights: Any) -> Array:
    weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    rows, tokens, _ = x.shape
    hidden = rms_norm(x, weights["first_norm"])
    query = (hidden @ weights["query"]).reshape(rows, tokens, GROUPS, -1, HEAD_SIZE)
    key = (hidden @ weights["key"]).reshape(rows, tokens, GROUPS, HEAD_SIZE)
    value = (hidden @ weights["value"]).reshape(rows, tokens, GROUPS, HEAD_SIZE)
    scores = jnp.einsum("btghd,bsgd->bghts", query, key).astype(jnp.float32) * HEAD_SIZE**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e30)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bghts,bsgd->btghd", shares, value).reshape(rows, tokens, -1)
    return feed_forward(x + mixed @ weights["out"], weights)


def feed_forward(x: Array, weights: Any) -> Array:
    """Return activations behind the gated half of a layer."""
    hidden = rms_norm(x, weights["second_norm"])
    gated = jax.nn.silu(hidden @ weights["gate"]) * (hidden @ weights["up"])
    return x + gated @ weights["down"]


def rms_norm(x: Array, scale: Array) -> Array:
    """Return activations with a mean square of 1, times a scale for each of the last dimension."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _gradients(form: str, mesh: Any) -> Callable[..., tuple[Array, Any]]:
    """Return a function of parameters and tokens to the loss and summed gradients."""
    grad_fn = jax.value_and_grad(loss_fn)
    if not form.endswith("in a map"):
        return grad_fn

    def local(params: Any, tokens: Array) -> tuple[Array, Any]:
        loss, grads = grad_fn(lax.pcast(params, "data", to="varying"), tokens)
        if form == "exact in a map":
            return lax.pmean((loss, grads), "data")
        grads = dq.pmean(grads, "data", key=jax.random.key(0), method=dq.Compression(specs=SPECS))
        return lax.pmean(loss, "data"), grads

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"}
    )


def _step(gradients: Callable[..., tuple[Array, Any]]) -> Callable[..., Any]:
    """Return a step of stochastic gradient descent with momentum."""

    def step(params: Any, momentum: Any, tokens: Array) -> tuple[Any, Any, Array]:
        loss, grads = gradients(params, tokens)
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, grads)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum, loss

    return step
