"""Decoder-only transformers of the Llama family.

Parameters are float32 and are cast to the dtype of computation where they are used. Modules have
the names of checkpoint files, and weights their layout, `[out, in]`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from transformers import LlamaConfig

Params = Any  # an `nnx.State`: what `nnx.split` leaves of a model beside its structure


class Linear(nnx.Module):
    """Matrix product; `weight` is float32 `[out, in]`."""

    def __init__(self, into: int, out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dtype = dtype
        self.weight = nnx.Param(nnx.initializers.normal(into**-0.5)(rngs.params(), (out, into)))

    def __call__(self, x: Array) -> Array:
        """Map `[..., in]` to `[..., out]`, both in the dtype of computation."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(self.dtype))


class RMSNorm(nnx.Module):
    """Division of features by their root mean square, in float32; `weight` is float32."""

    def __init__(self, features: int, config: LlamaConfig):
        self.epsilon = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones(features))

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis; shape and dtype are kept."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def rope_frequencies(head_dim: int, rope: Mapping[str, Any]) -> Array:
    """Compute the radians by which each pair of features rotates from a position to the next.

    Args:
      head_dim: features per head.
      rope: base of the frequencies, and how they are stretched for a longer context.

    Returns:
      float32 `[head_dim / 2]`.
    """
    exponent = -jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequency = float(rope["rope_theta"]) ** exponent
    if rope["rope_type"] == "default":
        return frequency
    factor = float(rope["factor"])
    if rope["rope_type"] == "linear":
        return frequency / factor
    # Pairs that turn often over the original context distinguish near tokens, and are kept.
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / factor)


def rotate(x: Array, angle: Array) -> Array:
    """Rotate pairs of features that are half a head apart: the rotary position embedding.

    Args:
      x: queries or keys `[batch, time, heads, head_dim]`.
      angle: float32 `[batch or 1, time, 1, head_dim / 2]`.

    Returns:
      An array of the shape and dtype of `x`, computed in float32.
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    turned = [left * cos - right * sin, right * cos + left * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention in which groups of heads share keys and values."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        into, self.head_dim = config.hidden_size, config.head_dim
        own = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(into, own, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(into, shared, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(into, shared, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(own, into, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, angle: Array, mask: Array) -> Array:
        """Map `[batch, time, width]` to the same shape."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (
            layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, angle), rotate(key, angle)
        mixed = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """Perceptron with gated hidden features (SwiGLU)."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        into, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(into, hidden, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(into, hidden, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(hidden, into, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map `[..., width]` to the same shape, each token by itself."""
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and MLP, each with a residual connection."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array, angle: Array, mask: Array) -> Array:
        """Map `[batch, time, width]` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), angle, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Language model that predicts the next token at each position.

    Args:
      config: shape of the decoder.
      dtype: dtype of computation; parameters are float32.
      remat: compute the activations of a block again in the backward pass instead of keeping them.
      rngs: random keys of the initial parameters.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.remat, self.head_dim = remat, config.head_dim
        # Hashable, as fields of modules that are no arrays have to be.
        self.rope = tuple(config.rope_parameters.items())
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([Block(config, dtype=dtype, rngs=rngs) for _ in layers])
        self.norm = RMSNorm(config.hidden_size, config)
        tied, sizes = config.tie_word_embeddings, (config.hidden_size, config.vocab_size)
        self.lm_head = None if tied else Linear(*sizes, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: Array, *, positions: Array | None = None, segments: Array | None = None
    ) -> Array:
        """Compute the logits of the next token at each position, float32
        `[batch, time, vocabulary]`; the arguments are those of `features`.
        """
        return self.logits(self.features(tokens, positions=positions, segments=segments))

    def logits(self, features: Array) -> Array:
        """Map features `[..., width]` to logits, float32 `[..., vocabulary]`."""
        return (self.lm_head or self.embed_tokens)(features).astype(jnp.float32)

    def features(
        self, tokens: Array, *, positions: Array | None = None, segments: Array | None = None
    ) -> Array:
        """Compute the features that the next token at each position depends on.

        Args:
          tokens: int32 `[batch, time]`.
          positions: int32 `[batch, time]`, for rows packed from several documents, each of which
            starts at 0; None counts from the start of the row.
          segments: int32 `[batch, time]`, the document of each token, which attends to no other;
            None for one document per row.

        Returns:
          `[batch, time, width]`, in the dtype of computation.
        """
        time = tokens.shape[1]
        if positions is None:
            positions = jnp.arange(time, dtype=jnp.int32)[None]
        frequencies = rope_frequencies(self.head_dim, dict(self.rope))
        angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
        mask = jnp.tril(jnp.ones((1, 1, time, time), jnp.bool_))
        if segments is not None:
            mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
        x = self.embed_tokens.weight[...][tokens].astype(self.embed_tokens.dtype)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for block in self.layers:
            x = run(block, x, angle, mask)
        return self.norm(x)


def abstract_decoder(
    config: LlamaConfig, *, dtype: DTypeLike = jnp.float32, remat: bool = False
) -> tuple[nnx.GraphDef, Params]:
    """Return the structure of a decoder, and the shapes of its parameters, float32."""
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, remat=remat, rngs=nnx.Rngs(0)))
    return nnx.split(abstract, nnx.Param)
