"""Decoder-only transformers of the Llama and Gemma 3 families.

Parameters are float32 and are cast to the dtype of computation where they are used. Weights are
`[out, in]`, as in checkpoint files, so that they are loaded by a plain copy.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from examples.llm.config import DecoderConfig, RopeScaling


class Linear(nnx.Module):
    """Matrix product; `weight` is float32 `[out, in]`."""

    def __init__(self, into: int, out: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dtype = dtype
        self.weight = nnx.Param(nnx.initializers.normal(into**-0.5)(rngs.params(), (out, into)))

    def __call__(self, x: Array) -> Array:
        """Map `[..., in]` to `[..., out]`, both in the dtype of computation."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(self.dtype))


class Embedding(nnx.Module):
    """Features of each token id; `weight` is float32 `[vocabulary, width]`."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.dtype = dtype
        shape = (config.vocabulary, config.width)
        self.weight = nnx.Param(nnx.initializers.normal(config.width**-0.5)(rngs.params(), shape))
        self.scale = math.sqrt(config.width) if config.family == "gemma3" else None

    def __call__(self, tokens: Array) -> Array:
        """Map int32 `[...]` to `[..., width]`."""
        x = self.weight[...][tokens].astype(self.dtype)
        # Gemma was trained with a factor rounded to the dtype of computation.
        return x if self.scale is None else x * jnp.asarray(self.scale, self.dtype)

    def logits(self, x: Array) -> Array:
        """Map `[..., width]` to `[..., vocabulary]`: the tied output layer."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...].astype(self.dtype))


class RMSNorm(nnx.Module):
    """Division of features by their root mean square; `weight` is float32 `[features]`.

    It is computed in float32. The factors of Gemma are `1 + weight`.
    """

    def __init__(self, features: int, config: DecoderConfig):
        self.epsilon = config.norm_epsilon
        self.offset = 1.0 if config.family == "gemma3" else 0.0
        self.weight = nnx.Param(jnp.full(features, 1.0 - self.offset))

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis; shape and dtype are kept."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        scale = self.offset + self.weight[...].astype(jnp.float32)
        return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Array:
    """Compute the radians by which each pair of features rotates from a position to the next.

    Args:
      head_dim: features per head.
      theta: base of the frequencies.
      scaling: how they are stretched.

    Returns:
      float32 `[head_dim / 2]`.
    """
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # Pairs that turn often over the original context distinguish near tokens, and are kept.
    turns = scaling.original_positions * frequency / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (kept + (1.0 - kept) / scaling.factor)


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


def attention_mask(time: int, segments: Array | None, window: int | None) -> Array:
    """Build the mask of tokens (last axis) to which each token (third axis) attends.

    Args:
      time: tokens per row.
      segments: int32 `[batch, time]`, the document of each token; None for one document.
      window: number of tokens to which each token attends, itself included; None for all before it.

    Returns:
      bool `[batch or 1, 1, time, time]`.
    """
    ago = jnp.arange(time)[:, None] - jnp.arange(time)[None, :]
    seen = ago >= 0
    if window is not None:
        seen &= ago < window
    seen = seen[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    return seen


def attend(query: Array, key: Array, value: Array, mask: Array, scale: float) -> Array:
    """Average values, weighted by the softmax of the products of queries and keys.

    Args:
      query: `[batch, time, heads, head_dim]`.
      key: `[batch, time, kv_heads, head_dim]`; `heads / kv_heads` queries share one key.
      value: array of the same shape.
      mask: bool `[batch or 1, 1, time, time]`, from `attention_mask`.
      scale: factor of the products.

    Returns:
      An array of the shape and dtype of `query`.
    """
    batch, time, _, head_dim = query.shape
    grouped = query.reshape(batch, time, key.shape[2], -1, head_dim)
    # `jax.nn.dot_product_attention` fails where implicit promotion of dtypes is forbidden.
    fit = jnp.einsum("btkgd,bskd->bkgts", grouped, key, preferred_element_type=jnp.float32)
    fit = jnp.where(mask[:, :, None], fit * scale, -jnp.inf)
    shares = jax.nn.softmax(fit, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", shares, value).reshape(query.shape)


class Attention(nnx.Module):
    """Causal self-attention in which groups of heads share keys and values."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        self.scale = (config.query_scale or config.head_dim) ** -0.5
        into, size = config.width, config.head_dim
        self.query = Linear(into, config.heads * size, dtype=dtype, rngs=rngs)
        self.key = Linear(into, config.kv_heads * size, dtype=dtype, rngs=rngs)
        self.value = Linear(into, config.kv_heads * size, dtype=dtype, rngs=rngs)
        self.out = Linear(config.heads * size, into, dtype=dtype, rngs=rngs)
        self.query_norm = RMSNorm(size, config) if config.family == "gemma3" else None
        self.key_norm = RMSNorm(size, config) if config.family == "gemma3" else None

    def __call__(self, x: Array, angle: Array, mask: Array) -> Array:
        """Map `[batch, time, width]` to the same shape."""
        heads = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (
            layer(x).reshape(heads) for layer in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = attend(rotate(query, angle), rotate(key, angle), value, mask, self.scale)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class GatedMLP(nnx.Module):
    """Perceptron with gated hidden features: SwiGLU, or GeGLU in Gemma."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = nnx.gelu if config.family == "gemma3" else nnx.silu
        self.gate = Linear(config.width, config.mlp_width, dtype=dtype, rngs=rngs)
        self.up = Linear(config.width, config.mlp_width, dtype=dtype, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """Map `[..., width]` to the same shape, each token by itself."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention and MLP, each with a residual connection; Gemma also normalizes their outputs."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, config)
        self.mlp = GatedMLP(config, dtype=dtype, rngs=rngs)
        gemma = config.family == "gemma3"
        self.attention_out_norm = RMSNorm(config.width, config) if gemma else None
        self.mlp_out_norm = RMSNorm(config.width, config) if gemma else None

    def __call__(self, x: Array, angle: Array, mask: Array) -> Array:
        """Map `[batch, time, width]` to the same shape."""
        added = self.attention(self.attention_norm(x), angle, mask)
        x = x + (self.attention_out_norm(added) if self.attention_out_norm else added)
        added = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_out_norm(added) if self.mlp_out_norm else added)


class Decoder(nnx.Module):
    """Language model that predicts the next token at each position.

    Args:
      config: shape of the decoder.
      dtype: dtype of computation; parameters are float32.
      remat: keep only the input of each block for the backward pass and compute the rest again,
        which takes less memory for a third more work.
      rngs: random keys of the initial parameters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.remat = remat
        self.embedding = Embedding(config, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.layers)]
        )
        self.norm = RMSNorm(config.width, config)
        self.head = (
            None
            if config.tie_embeddings
            else Linear(config.width, config.vocabulary, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self, tokens: Array, *, positions: Array | None = None, segments: Array | None = None
    ) -> Array:
        """Compute the logits of the next token at each position.

        Args:
          tokens: int32 `[batch, time]`.
          positions: int32 `[batch, time]`, for rows packed from several documents, each of which
            starts at 0; None counts from the start of the row.
          segments: int32 `[batch, time]`, the document of each token, which attends to no other;
            None for one document per row.

        Returns:
          float32 `[batch, time, vocabulary]`.
        """
        config, time = self.config, tokens.shape[1]
        if positions is None:
            positions = jnp.arange(time, dtype=jnp.int32)[None]
        at = positions[:, :, None, None].astype(jnp.float32)

        def angles(theta: float, scaling: RopeScaling | None) -> Array:
            return at * rope_frequencies(config.head_dim, theta, scaling)[None, None, None, :]

        # Angles and mask of global blocks, and those of local ones.
        views = {
            False: (
                angles(config.rope_theta, config.rope_scaling),
                attention_mask(time, segments, None),
            ),
            True: (
                angles(config.local_rope_theta, None),
                attention_mask(time, segments, config.sliding_window),
            ),
        }
        x = self.embedding(tokens)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for layer, block in enumerate(self.blocks):
            x = run(block, x, *views[config.is_local(layer)])
        x = self.norm(x)
        logits = self.embedding.logits(x) if self.head is None else self.head(x)
        return logits.astype(jnp.float32)


def abstract_params(config: DecoderConfig) -> nnx.State:
    """Return names and shapes of a decoder's parameters, float32, without values."""
    return nnx.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param))
