"""A decoder-only transformer, of the kind that large language models are built on."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Size of a transformer."""

    vocabulary: int  # token ids
    width: int = 256  # features of a token
    layers: int = 2  # blocks
    heads: int = 4  # attention heads of a block

    @property
    def hidden(self) -> int:
        """Features inside the gated MLP."""
        return 3 * self.width


def rotate(x: jax.Array) -> jax.Array:
    """Embed positions by rotation.

    Args:
      x: queries or keys, float [batch, time, heads, features] with an even last axis.

    Returns:
      The same shape and dtype. The product of a query and a key depends on their distance.
    """
    _, time, _, features = x.shape
    frequency = 10_000.0 ** (-jnp.arange(0, features, 2) / features)
    angle = jnp.arange(time)[:, None, None] * frequency
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.into = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix each token with those before it; float [batch, time, width] in and out."""
        batch, time, width = x.shape
        qkv = self.into(x).reshape(batch, time, 3, self.heads, width // self.heads)
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(batch, time, width))


class GatedMLP(nnx.Module):
    """Two-layer perceptron whose hidden features are gated (SwiGLU)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.gate = nnx.Linear(config.width, config.hidden, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform each token on its own; float [..., width] in and out."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class TransformerBlock(nnx.Module):
    """Attention, then the MLP, each beside a residual path."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.mlp = GatedMLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Refine all tokens; float [batch, time, width] in and out."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nnx.Module):
    """Transformer that predicts every next token of a sequence."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        # The embedding is also the output layer, so its scale sets that of the first logits.
        init = nnx.initializers.normal(config.width**-0.5)
        self.embedding = nnx.Embed(config.vocabulary, config.width, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map int32 tokens [batch, time] to float logits [batch, time, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))
