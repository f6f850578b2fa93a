"""The fine-tuned model as a checkpoint folder, in the layout of the one that it came from."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from examples.llm import checkpoint
from examples.llm.config import DecoderConfig

# Files of the tokenizer and of generation, which are copied if the folder has them.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def written_dtype(config: DecoderConfig) -> jnp.dtype:
    """Return the dtype that config.json names for the weights, float32 if it names none.

    Raises:
      ValueError: checkpoints are not written in this dtype.
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
    """Write weights in the dtype that config.json names, and the tokenizer. All processes call it.

    Args:
      folder: where to write, replacing a model that it may hold.
      config: configuration of the model.
      params: float32 parameters, spread over the devices of all processes.
      source: folder that the model came from.
    """
    checkpoint.save(folder, config, params, dtype=written_dtype(config))
    if jax.process_index() == 0:
        for name in COPIED:
            # A file that `source` lacks must not stay from an earlier model.
            (folder / name).unlink(missing_ok=True)
            if (source / name).is_file():
                shutil.copy(source / name, folder / name)
