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
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig

from examples.llm import checkpoint
from examples.llm.model import Decoder
from examples.llm.run import Record, read_records

WORDS = ("the", "gradient", "of", "a", "loss", "is", "sent", "in", "five", "bits", "as", "mean")
BEGIN, END, START_HEADER, END_HEADER = "<|begin|>", "<|end|>", "<|start_header|>", "<|end_header|>"
MARKS = (BEGIN, END, START_HEADER, END_HEADER)
# In the manner of Llama 3, which marks no answers, and of a model that does.
UNMARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header|>' + message['role'] + '<|end_header|>' }}
    {{- message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|end_header|>' }}
{%- endif %}
"""
MARKED = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header|>' + message['role'] + '<|end_header|>' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
"""


def write_tokenizer(folder: pathlib.Path, template: str | None = UNMARKED) -> int:
    """Write a tokenizer of bytes and marks, and a chat template; return its number of tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return tokenizer.get_vocab_size()


def write(folder: pathlib.Path) -> None:
    """Write FOLDER/start, a checkpoint with random weights, and FOLDER/chats.jsonl."""
    start = folder / "start"
    start.mkdir()
    config = LlamaConfig(
        vocab_size=write_tokenizer(start),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    checkpoint.save(start, config, nnx.state(model, nnx.Param))
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
    records = read_records(output / "metrics.jsonl")
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
