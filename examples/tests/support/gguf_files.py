"""GGUF files of tiny decoders of the Llama family, written from tensors in Hugging Face's layout.

Written from the description of the format and on its own: it shares nothing with the converter.
"""

import pathlib
from typing import Any

import gguf
import numpy as np

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "1 2")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tokens() -> list[str]:
    """All tokens: marks, the 256 bytes in GPT-2's letters, and merged pairs."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + i) for i in range(len(other))]
    return [*MARKS, *letters, *(pair.replace(" ", "") for pair in MERGES)]


def write(
    file: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: str = "F32",
    **fields: Any,
) -> None:
    """Write a file.

    Args:
      file: the file.
      config: those keys of config.json that matter.
      tensors: in Hugging Face's layout.
      kind: how matrices are stored.
      **fields: fields to add or replace, such as `general__architecture="gpt2"`; None leaves one
        out.
    """
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    known = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads[0],
        "llama.attention.head_count_kv": heads[1],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(MARKS) + [1] * (len(tokens()) - len(MARKS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    known |= {name.replace("__", "."): value for name, value in fields.items()}
    writer = gguf.GGUFWriter(file, known.pop("general.architecture"))
    for name, value in known.items():
        match value:
            case None:
                continue
            case str():
                writer.add_string(name, value)
            case list():
                writer.add_array(name, value)
            case float():
                writer.add_float32(name, value)
            case _:
                writer.add_uint32(name, value)
    stored = gguf.GGMLQuantizationType[kind]
    for name, values in tensors.items():
        short, _, _ = name.rpartition(".")
        prefix = ""
        if short.startswith("model.layers."):
            _, _, layer, short = short.split(".", 3)
            prefix = f"blk.{layer}."
        if short in ("self_attn.q_proj", "self_attn.k_proj"):
            values = interleaved(values, heads[short == "self_attn.k_proj"])
        data, raw = values, None
        if values.ndim == 2 and kind != "F32":
            data, raw = gguf.quants.quantize(values, stored), stored
        writer.add_tensor(f"{prefix}{NAMES[short]}.weight", data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put rows that rotate together, half a head apart, side by side."""
    result = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for pair in range(size // 2):
            for half in range(2):
                row = head * size + pair + half * size // 2
                result[head * size + 2 * pair + half] = weight[row]
    return result
