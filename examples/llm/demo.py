"""A checkpoint and data for the demonstration, made without a download.

A small decoder of the Llama family is pre-trained on the source code of the Python standard
library. The data is the Python language reference.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.llm import checkpoint
from examples.llm.config import DecoderConfig
from examples.llm.corpora import END_OF_TEXT, Corpora, load_corpora
from examples.llm.model import Decoder
from examples.llm.pretraining import Params, pretrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Files of the demonstration."""

    checkpoint: Path  # folder
    data: Path  # documents to train on
    evaluation_data: Path  # documents to evaluate on


def prepare(folder: Path, *, steps: int, on_step: Callable[[int, str], None]) -> Demo:
    """Make a checkpoint and data, unless an earlier call has made them.

    Args:
      folder: where to write.
      steps: steps of pre-training.
      on_step: called after each step with its index and a message.

    Returns:
      Where everything is.
    """
    target = folder / f"pretrained_{steps}"
    demo = Demo(
        checkpoint=target,
        data=target / "train.jsonl",
        evaluation_data=target / "evaluation.jsonl",
    )
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
    partial.replace(target)  # If the folder is there, it is complete.
    return demo


def small_config(vocabulary: int) -> DecoderConfig:
    """Return the shape of a decoder with 1.6 M parameters beside the embeddings."""
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
    """Initialize a decoder and return its structure and its parameters, float32."""
    return nnx.split(Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)), nnx.Param)


def _write(path: Path, corpora: Corpora, tokens: np.ndarray) -> None:
    """Write the documents of a corpus, one per line. Each ends with the end-of-text token."""
    ends = np.flatnonzero(tokens == corpora.tokenizer.token_to_id(END_OF_TEXT))
    documents = np.split(tokens, ends + 1)[:-1]
    lines = (json.dumps({"text": corpora.tokenizer.decode(ids[:-1])}) for ids in documents)
    path.write_text("\n".join(lines) + "\n")
