"""Decoders of the Llama family in float64 NumPy, one token after the other.

Written from the architectures and on its own: it reads `config.json` and the tensors by their
names in the files, and shares nothing with `examples/llm`.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint."""
    width, mlp, size = hf["hidden_size"], hf["intermediate_size"], hf["head_dim"]
    queries, keys = hf["num_attention_heads"] * size, hf["num_key_value_heads"] * size
    found = {"model.embed_tokens.weight": (hf["vocab_size"], width), "model.norm.weight": (width,)}
    if not hf["tie_word_embeddings"]:
        found["lm_head.weight"] = (hf["vocab_size"], width)
    inside = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    for layer in range(hf["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{k}.weight": shape for k, shape in inside.items()}
    return found


def random_tensors(hf: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Values for all tensors: matrices that keep magnitudes, norms that are no identity."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in shapes(hf).items():
        values = rng.normal(size=shape)
        if len(shape) == 2:
            values *= 1.5 / math.sqrt(shape[1])
        else:
            values = 0.3 * values + 1
        tensors[name] = values.astype(dtype)
    return tensors


def write(folder: Path, hf: dict[str, Any], tensors: dict[str, np.ndarray], files: int = 1) -> None:
    """Writes a checkpoint folder whose tensors are dealt out to some files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    where = {}
    for index in range(files):
        name = f"model-{index + 1:05d}-of-{files:05d}.safetensors"
        share = dict(list(tensors.items())[index::files])
        save_file(share, folder / name)
        where |= dict.fromkeys(share, name)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Scores of every token id after each token of one sequence, float64 `[time, vocabulary]`."""
    hf = json.loads((folder / "config.json").read_text())
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= {name: t.astype(np.float64) for name, t in load_file(file).items()}
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[tokens]
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        block = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        x = _block(x, block, hf)
    x = _norm(x, weights["model.norm.weight"], hf)
    return x @ weights.get("lm_head.weight", embedding).T


def _block(x, block, hf):
    frequencies = _scaled_frequencies(hf, hf["rope_theta"], hf["rope_scaling"])
    fits = _norm(x, block["input_layernorm"], hf)
    x = x + _attention(fits, block, hf, frequencies)
    fits = _norm(x, block["post_attention_layernorm"], hf)
    gate = fits @ block["mlp.gate_proj"].T
    hidden = gate / (1 + np.exp(-gate)) * (fits @ block["mlp.up_proj"].T)
    return x + hidden @ block["mlp.down_proj"].T


def _norm(x, weight, hf):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + hf["rms_norm_eps"]) * weight


def _attention(x, block, hf, frequencies):
    size, groups = hf["head_dim"], hf["num_attention_heads"] // hf["num_key_value_heads"]
    out = np.zeros((len(x), hf["num_attention_heads"], size))
    for head in range(hf["num_attention_heads"]):
        own = slice(head * size, (head + 1) * size)
        shared = slice(head // groups * size, (head // groups + 1) * size)
        query = x @ block["self_attn.q_proj"][own].T
        key = x @ block["self_attn.k_proj"][shared].T
        value = x @ block["self_attn.v_proj"][shared].T
        for at in range(len(x)):
            seen = range(at + 1)
            turned = _turn(query[at], at, frequencies)
            fit = [turned @ _turn(key[other], other, frequencies) for other in seen]
            share = np.exp(np.array(fit) / math.sqrt(size))
            out[at, head] = share @ value[list(seen)] / share.sum()
    return out.reshape(len(x), -1) @ block["self_attn.o_proj"].T


def _turn(vector, position, frequencies):
    """Features i and i + half are a complex number, turned by its frequency at every position."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * position * np.array(frequencies))
    return np.concatenate([turned.real, turned.imag])


def _scaled_frequencies(hf, theta, scaling):
    frequencies = [theta ** (-2 * i / hf["head_dim"]) for i in range(hf["head_dim"] // 2)]
    if scaling is None:
        return frequencies
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return [f / factor for f in frequencies]
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for f in frequencies:
        wavelength = 2 * math.pi / f
        if wavelength < context / high:
            scaled.append(f)
        elif wavelength > context / low:
            scaled.append(f / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * f / factor + smooth * f)
    return scaled
