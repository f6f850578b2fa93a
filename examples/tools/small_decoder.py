"""A model and data for the demonstration, without a download.

The model is a new small decoder of the Llama family. The data is the source code of the standard
library, which comes with every Python.
"""

import sysconfig
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from examples.llm import checkpoint
from examples.llm.model import Decoder, Params
from examples.tools.document_files import write_documents

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
SOURCE_CODE_CHARACTERS = 4_000_000
TOKENIZER_CHARACTERS = 1_000_000
DATA = "source_code.jsonl"


def prepare(folder: Path) -> None:
    """Write a new decoder and the text, unless an earlier call has."""
    if (folder / DATA).exists():  # the last file
        return
    texts = standard_library()
    tokenizer = train_tokenizer(texts)
    config = small_config(tokenizer.get_vocab_size())
    checkpoint.save(folder, config, new_decoder(config)[1])
    tokenizer_of_folder = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
    tokenizer_of_folder.save_pretrained(folder)
    write_documents(folder / DATA, texts)


def small_config(vocabulary: int) -> LlamaConfig:
    """Return the shape of a decoder with 1.6 M parameters beside the embeddings."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )


def new_decoder(config: LlamaConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialize a decoder and return its structure and its parameters, float32."""
    return nnx.split(Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)), nnx.Param)


def standard_library() -> list[str]:
    """Read the top-level modules in alphabetical order, up to a total size."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(
            "This Python has no source code of its standard library. Use one that has it, such as "
            "one from python.org."
        )
    texts, size = [], 0
    for file in files:
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
        if size > SOURCE_CODE_CHARACTERS:
            break
    return texts


def train_tokenizer(*corpora: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer on evenly spaced texts of each corpus."""
    texts: list[str] = []
    for corpus in corpora:
        texts += corpus[:: 1 + sum(map(len, corpus)) // TOKENIZER_CHARACTERS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
