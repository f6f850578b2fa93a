"""Names of parameters in the decoder and in Hugging Face's files."""

import re
from collections.abc import Iterator
from typing import Any

import jax

from examples.llm.config import DecoderConfig, Family

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_COMMON = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_INSIDE: dict[Family, dict[str, str]] = {
    "llama": _COMMON | {"mlp_norm": "post_attention_layernorm"},
    "gemma3": _COMMON
    | {
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}

# Prefixes in files with an image encoder, and those of the language model alone.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# Parts of an image encoder, and a table of rotary frequencies in old files.
_SKIPPED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def named_leaves(params: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of parameters with names such as "blocks.0.attention.query.weight"."""
    for path, leaf in jax.tree.leaves_with_path(params):
        yield jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), leaf


def hf_name(name: str, family: Family) -> str:
    """Return the name of a parameter in files."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, inside = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{_INSIDE[family][inside]}.weight"


def plain_name(stored: str, config: DecoderConfig) -> str | None:
    """Return the name of a stored tensor in a file of the language model alone.

    Returns:
      The name, or None if the tensor is not part of the decoder.
    """
    if _SKIPPED.match(stored) or (config.tie_embeddings and stored.endswith("lm_head.weight")):
        return None
    for prefix, plain in _PREFIXES:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored
