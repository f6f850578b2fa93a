"""A tiny checkpoint, data and a mesh for the fine-tuning example, and what its runs leave."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from examples.llm import checkpoint
from examples.llm.config import DecoderConfig
from examples.llm.metrics import Record, read
from examples.llm.model import Decoder
from tests.support import llm_chat_templates
from tests.support.llm_tokenizers import MARKS, byte_tokenizer

WORDS = ("the", "gradient", "of", "a", "loss", "is", "sent", "in", "five", "bits", "as", "mean")


def write(folder: pathlib.Path) -> None:
    """Write FOLDER/start, a checkpoint with random weights, and FOLDER/chats.jsonl."""
    tokenizer = byte_tokenizer(MARKS["llama3"])
    config = DecoderConfig(
        family="llama",
        vocabulary=tokenizer.get_vocab_size(),
        width=32,
        mlp_width=64,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        tie_embeddings=True,
    )
    start = folder / "start"
    start.mkdir()
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    checkpoint.save(start, config, nnx.state(model, nnx.Param))
    llm_chat_templates.write(start, "llama3")
    rng = np.random.default_rng(0)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(60):
            user, assistant = (" ".join(rng.choice(WORDS, 6)) for _ in range(2))
            turns = [("user", user), ("assistant", assistant)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def mesh_of(workers: int, fsdp: int = 1) -> Mesh:
    """Make a mesh of the first devices."""
    axes, devices = (AxisType.Auto,) * 2, jax.devices()[: workers * fsdp]
    return jax.make_mesh((workers, fsdp), ("data", "fsdp"), axis_types=axes, devices=devices)


def losses(output: pathlib.Path) -> list[Record]:
    """Read all records of a run, without times."""
    records = read(output / "metrics.jsonl")
    return [{k: v for k, v in r.items() if "second" not in k} for r in records]


def last_state(output: pathlib.Path, step: int) -> Any:
    """Read parameters, moments and the method's state of all devices after a step."""
    path = (output / f"checkpoints/{step}/default").resolve()
    here = SingleDeviceSharding(jax.devices()[0])  # Its own devices may be those of others.
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), dict(saved)
        )
        return checkpointer.restore(path, target)
