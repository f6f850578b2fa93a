"""A decoder of any size, and its train step as one global program for a mesh of data x fsdp."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.training.big_models.decoder import feed_forward, rms_norm

ROWS = P(("data", "fsdp"))
_SPECS = {
    **dict.fromkeys(("query", "key", "value", "gate", "up"), P(None, "fsdp")),
    **dict.fromkeys(("out", "down"), P("fsdp")),
    **dict.fromkeys(("first_norm", "second_norm"), P()),
}
_OTHERS = {"embed": P("fsdp"), "head": P(None, "fsdp"), "norm": P()}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@dataclasses.dataclass(frozen=True)
class GlobalDecoder:
    """Shapes of a decoder, and whether its layers are a scan."""

    layers: int
    width: int
    vocabulary: int
    heads: int = 4
    scan: bool = True
    dtype: Any = jnp.float32  # of the computation; parameters are float32

    def shapes(self) -> Any:
        """Return the parameters: nine matrices and vectors of each layer, and three others."""
        width, inner = self.width, 4 * self.width
        of_layer = {
            **dict.fromkeys(("query", "key", "value", "out"), (width, width)),
            **dict.fromkeys(("gate", "up"), (width, inner)),
            "down": (inner, width),
            **dict.fromkeys(("first_norm", "second_norm"), (width,)),
        }
        layers: Any = [of_layer] * self.layers
        if self.scan:
            layers = {name: (self.layers, *shape) for name, shape in of_layer.items()}
        tree = {
            "embed": (self.vocabulary, width),
            "head": (width, self.vocabulary),
            "norm": (width,),
            "layers": layers,
        }
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            tree,
            is_leaf=lambda leaf: isinstance(leaf, tuple),
        )

    @property
    def specs(self) -> Any:
        """How the parameters are split."""
        layers: Any = [_SPECS] * self.layers
        if self.scan:
            layers = {name: P(None, *spec) for name, spec in _SPECS.items()}
        return {**_OTHERS, "layers": layers}

    def arguments(self, mesh: Mesh, rows: int, length: int) -> tuple[Any, Any, Any]:
        """Return parameters, state of the optimizer and tokens, without arrays."""

        def placed(shape: Any, spec: P) -> Any:
            return shape.update(sharding=NamedSharding(mesh, spec))

        params = jax.tree.map(placed, self.shapes(), self.specs)
        state = jax.eval_shape(OPTIMIZER.init, params)
        # Moments lie as their parameters do.
        state = optax.tree_map_params(
            OPTIMIZER, placed, state, self.specs, transform_non_params=lambda s: placed(s, P())
        )
        tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
        return params, state, placed(tokens, ROWS)

    def loss(self, params: Any, tokens: Array) -> Array:
        """Return the mean cross entropy of the next tokens, int32 [rows, tokens + 1]."""
        x = jnp.take(params["embed"], tokens[:, :-1], axis=0).astype(self.dtype)
        layer = jax.checkpoint(self._layer)
        if self.scan:
            x, _ = lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
        else:
            for weights in params["layers"]:
                x = layer(x, weights)
        logits = rms_norm(x, params["norm"]) @ params["head"].astype(x.dtype)
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1))

    def step(self) -> Callable[..., Any]:
        """Return a train step."""

        def step(params: Any, state: Any, tokens: Array) -> tuple[Any, Any, Array]:
            value, gradients = jax.value_and_grad(self.loss)(params, tokens)
            updates, state = OPTIMIZER.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        return step

    def _layer(self, x: Array, weights: Any) -> Array:
        weights = jax.tree.map(lambda leaf: leaf.astype(x.dtype), weights)
        rows, tokens, width = x.shape
        hidden = rms_norm(x, weights["first_norm"])
        query, key, value = (
            (hidden @ weights[name]).reshape(rows, tokens, self.heads, -1)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), value)
        return feed_forward(x + mixed.reshape(rows, tokens, width) @ weights["out"], weights)
