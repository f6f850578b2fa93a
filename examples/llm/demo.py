"""Something to fine-tune without a download: a small decoder of the Llama family, pre-trained here
on the source code of the Python standard library, and the Python language reference as data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.llm import checkpoint
from examples.llm.config import DecoderConfig
from examples.llm.corpora import END_OF_TEXT, Corpora, load_corpora
from examples.llm.model import Decoder
from examples.llm.pretraining import Params, pretrain


@dataclass(frozen=True)
class Demo:
    """Files that take the place of a user's own.

    Attributes:
        checkpoint: A checkpoint folder.
        data: Documents to train on.
        evaluation_data: Documents to evaluate on.
    """

    checkpoint: Path
    data: Path
    evaluation_data: Path


def prepare(folder: Path, *, steps: int, on_step: Callable[[int, str], None]) -> Demo:
    """Writes a checkpoint and data; later calls find them again.

    Args:
        folder: Where to write.
        steps: Steps of pre-training.
        on_step: Called after each with its index and a message.

    Returns:
        Where everything is.
    """
    target = folder / f"pretrained_{steps}"
    demo = Demo(target, target / "train.jsonl", target / "evaluation.jsonl")
    if target.exists():
        return demo
    corpora = load_corpora()
    config = small_config(corpora.vocabulary)
    structure, params = new_decoder(config)
    params = pretrain(
        structure,
        params,
        corpora.source_code,
        steps=steps,
        on_step=lambda step, loss: on_step(step, f"loss {loss:.3f}"),
    )
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    checkpoint.save(partial, config, params)
    corpora.tokenizer.save(str(partial / "tokenizer.json"))
    _write(partial / demo.data.name, corpora, corpora.reference)
    _write(partial / demo.evaluation_data.name, corpora, corpora.held_out)
    partial.replace(target)  # All of it or nothing: a later call trusts what it finds.
    return demo


def small_config(vocabulary: int) -> DecoderConfig:
    """Two layers of the Llama family, 1.6 M parameters beside the embeddings."""
    return DecoderConfig(
        family="llama",
        vocabulary=vocabulary,
        width=256,
        mlp_width=768,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        tie_embeddings=True,
    )


def new_decoder(config: DecoderConfig, seed: int = 0) -> tuple[nnx.GraphDef, Params]:
    """Initialises a decoder, apart into its structure and its parameters (float32)."""
    return nnx.split(Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)), nnx.Param)


def _write(path: Path, corpora: Corpora, tokens: np.ndarray) -> None:
    """The documents of a corpus, in which each ends with a token, one a line."""
    ends = np.flatnonzero(tokens == corpora.tokenizer.token_to_id(END_OF_TEXT))
    documents = np.split(tokens, ends + 1)[:-1]
    lines = (json.dumps({"text": corpora.tokenizer.decode(ids[:-1])}) for ids in documents)
    path.write_text("\n".join(lines) + "\n")
