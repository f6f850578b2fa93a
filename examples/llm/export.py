"""The fine-tuned model as a checkpoint folder, for whatever reads the one that it came from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.llm import checkpoint
from examples.llm.config import DecoderConfig

# What belongs to the text rather than to the network, where the folder has it.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def written_dtype(config: DecoderConfig) -> jnp.dtype:
    """The dtype that config.json names for the weights, float32 if it names none.

    Raises:
        ValueError: It is none that a checkpoint is written in.
    """
    name = config.source.get("torch_dtype") or config.source.get("dtype") or "float32"
    known = {dtype.dtype.name: dtype.dtype for dtype in checkpoint.DTYPES.values()}
    if name not in known:
        raise ValueError(
            f"config.json has dtype {name!r}, in which no weights are written. Change it to one of "
            f"{', '.join(known)}."
        )
    return known[name]


def write_model(folder: Path, config: DecoderConfig, params: Any, source: Path) -> None:
    """Writes weights in the dtype that config.json names, and the tokenizer. All processes call it.

    Args:
        folder: Where to write, in place of a model that it may hold.
        config: That of the model.
        params: float32, in parts on the devices of all processes.
        source: The folder that the model came from.
    """
    checkpoint.save(folder, config, params, dtype=written_dtype(config))
    if jax.process_index() == 0:
        for name in COPIED:
            # That of an earlier model would come before what this one has elsewhere.
            (folder / name).unlink(missing_ok=True)
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
