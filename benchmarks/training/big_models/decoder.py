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

FORMS = ("exact", "exact in a map", "pcast in the scan", "pmean")
# Of `dq.data_parallel`. With rows, scores of the vocabulary are split along rows alone.
TRANSFORMS = ("shard_map", "vmap", "vmap with rows")

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

    form: str  # of FORMS or TRANSFORMS
    layers: int
    devices: tuple[int, int]

    def lower(self) -> Any:
        """Lower the training step for virtual devices."""
        mesh = jax.make_mesh(self.devices, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
        rows = NamedSharding(mesh, P(("data", "fsdp")))
        step = jax.jit(
            _step(_gradients(self.form, mesh)),
            in_shardings=(placed, placed, rows, None),
            out_shardings=(placed, placed, None),
            donate_argnums=(0, 1),
        )
        tokens = jax.ShapeDtypeStruct((mesh.size, TOKENS + 1), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return step.lower(shapes(self.layers), shapes(self.layers), tokens, key)


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


def _same(tree: Any, specs: Any = None) -> Any:
    return tree


def loss_fn(
    params: Any,
    tokens: Array,
    cast: Callable[[Any, Any], Any] = _same,
    by_rows: Callable[[Array], Array] = _same,
) -> Array:
    """Return the mean cross entropy of the next tokens.

    Args:
      params: as `shapes`.
      tokens: int32 [rows, tokens + 1].
      cast: applied to the parameters of each layer in the body of the scan, and to all others, with
        their specs.
      by_rows: applied to the scores of the vocabulary.
    """
    others = {name: params[name] for name in ("embed", "head", "norm")}
    others = cast(others, {name: SPECS[name] for name in others})
    of_layer = jax.tree.map(lambda spec: P(*spec[1:]), SPECS["layers"])

    def body(x: Array, weights: Any) -> tuple[Array, None]:
        return _layer(x, cast(weights, of_layer)), None

    x = jnp.take(others["embed"], tokens[:, :-1], axis=0).astype(jnp.bfloat16)
    x, _ = lax.scan(jax.checkpoint(body), x, params["layers"])
    logits = _norm(x, others["norm"]) @ others["head"].astype(x.dtype)
    scores = by_rows(jax.nn.log_softmax(logits.astype(jnp.float32)))
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def _layer(x: Array, weights: Any) -> Array:
    weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
    rows, tokens, _ = x.shape
    hidden = _norm(x, weights["first_norm"])
    query = (hidden @ weights["query"]).reshape(rows, tokens, GROUPS, -1, HEAD_SIZE)
    key = (hidden @ weights["key"]).reshape(rows, tokens, GROUPS, HEAD_SIZE)
    value = (hidden @ weights["value"]).reshape(rows, tokens, GROUPS, HEAD_SIZE)
    scores = jnp.einsum("btghd,bsgd->bghts", query, key).astype(jnp.float32) * HEAD_SIZE**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e30)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bghts,bsgd->btghd", shares, value).reshape(rows, tokens, -1)
    x = x + mixed @ weights["out"]
    hidden = _norm(x, weights["second_norm"])
    gated = jax.nn.silu(hidden @ weights["gate"]) * (hidden @ weights["up"])
    return x + gated @ weights["down"]


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale.astype(x.dtype)


def _gradients(form: str, mesh: Any) -> Callable[..., tuple[Array, Any]]:
    """Return a function of parameters, tokens and a key to the loss and summed gradients."""

    def alone(params: Any, tokens: Array, key: Array) -> tuple[Array, Any]:
        del key
        return jax.value_and_grad(loss_fn)(params, tokens)

    def local(params: Any, tokens: Array, key: Array) -> tuple[Array, Any]:
        def exact(tree: Any, specs: Any) -> Any:
            return lax.pcast(tree, "data", to="varying")

        def compressed(tree: Any, specs: Any) -> Any:
            return dq.pcast(tree, "data", to="varying", key=key, specs=specs)

        if form == "pmean":
            own = lax.pcast(params, "data", to="varying")
            loss, grads = jax.value_and_grad(loss_fn)(own, tokens)
            return lax.pmean(loss, "data"), dq.pmean(grads, "data", key=key, specs=SPECS)
        cast = exact if form == "exact in a map" else compressed
        return jax.value_and_grad(lambda params: lax.pmean(loss_fn(params, tokens, cast), "data"))(
            params
        )

    def wrapped(params: Any, tokens: Array, key: Array) -> tuple[Array, Any]:
        def split(scores: Array) -> Array:
            return lax.with_sharding_constraint(scores, NamedSharding(mesh, P("fsdp", None, None)))

        by_rows = split if form.endswith("with rows") else _same
        mean_loss = dq.data_parallel(
            lambda params, tokens: loss_fn(params, tokens, by_rows=by_rows),
            mesh=mesh,
            axis_name="data",
            specs=SPECS,
            transform="shard_map" if form == "shard_map" else "vmap",
        )
        return jax.value_and_grad(mean_loss)(params, tokens)

    if form == "exact":
        return alone
    if form in TRANSFORMS:
        return wrapped
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )


def _step(gradients: Callable[..., tuple[Array, Any]]) -> Callable[..., Any]:
    """Return a step of stochastic gradient descent with momentum."""

    def step(params: Any, momentum: Any, tokens: Array, key: Array) -> tuple[Any, Any, Array]:
        loss, grads = gradients(params, tokens, key)
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, momentum, grads)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum, loss

    return step
