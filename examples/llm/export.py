"""The fine-tuned model as a checkpoint folder, for whatever reads the one that it came from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import checkpoint
from .config import DecoderConfig

# What belongs to the text rather than to the network, where the folder has it.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def write_model(folder: Path, config: DecoderConfig, params: Any, source: Path, mesh: Mesh) -> None:
    """Writes weights in the dtype that config.json names, and the tokenizer. All processes call it.

    Args:
        folder: Where to write; replaced as a whole if it is there.
        config: That of the model.
        params: float32, in parts on the devices of all processes.
        source: The folder that the model came from.
        mesh: Its devices.
    """
    dtype = jnp.dtype(config.source.get("torch_dtype") or config.source.get("dtype") or "float32")
    whole = jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=NamedSharding(mesh, P()))
    first = jax.process_index() == 0

    def on_host(leaf: jax.Array) -> np.ndarray | None:
        gathered = whole(leaf)  # One leaf at a time: no device need hold the whole model.
        return np.asarray(gathered) if first else None

    params = jax.tree.map(on_host, params)
    if not first:
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    checkpoint.save(partial, config, params)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, partial / name)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
