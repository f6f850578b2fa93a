"""Hugging Face checkpoint folders: config.json beside one or several safetensors files.

Tensors are placed on their devices one by one, so that a process never holds much more than its own
share of the checkpoint. Networks other than that of Llama are refused.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from transformers import LlamaConfig

from examples.llm.model import Params, abstract_decoder

CONFIG = "config.json"
COPY_AGAIN = "Copy or download the checkpoint again."
# Dtypes of weights, as safetensors files spell them.
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
SINGLE = "model.safetensors"
INDEX = f"{SINGLE}.index.json"
# Files that go with the weights: training changes none of them.
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
COPIED += ("generation_config.json", "chat_template.jinja")

# Values of keys under which the network is the one that is implemented.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "quantization_config": (None,),
    "hidden_act": ("silu",),
}
# Keys of the ways to stretch rotary frequencies.
_ORIGINAL = "original_max_position_embeddings"
_ROPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
}


def read_object(path: Path, remedy: str = COPY_AGAIN) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
      FileNotFoundError: there is no such file; the message ends with the remedy.
      ValueError: the file is not JSON, or has something other than an object.
    """
    try:
        content = json.loads(path.read_bytes())  # which detects UTF-8, UTF-16 and UTF-32
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing. {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken JSON: {error}. {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has a {type(content).__name__}, not a JSON object. {remedy}")
    return content


def read_config(folder: Path) -> LlamaConfig:
    """Read the configuration of a checkpoint.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: config.json is broken, or its network is not implemented; the message names all
        keys that prevent it.
    """
    path = folder / CONFIG
    content = read_object(path)
    kind = content.pop("model_type", None)
    if kind != "llama":
        raise ValueError(f"{path}: model_type is {kind!r}. Give a checkpoint of type 'llama'.")
    try:
        config = LlamaConfig(**content)
        problems = _unsupported(config)
    except Exception as error:  # The library raises whatever a wrong value leads to.
        raise ValueError(f"{path} does not describe a Llama model: {error}") from None
    if problems:
        raise ValueError(f"{path} is not supported:\n  " + "\n  ".join(problems))
    return config


def _unsupported(config: LlamaConfig) -> list[str]:
    """Describe all that the decoder does not implement."""
    problems = [
        f"{key} is {getattr(config, key)!r}, which is not implemented."
        for key, neutral in _NEUTRAL.items()
        if getattr(config, key, neutral[0]) not in neutral
    ]
    if config.num_attention_heads % config.num_key_value_heads:
        problems.append("num_key_value_heads does not divide num_attention_heads.")
    known = [np.dtype(dtype).name for dtype in DTYPES.values()]
    if _dtype_name(config) not in known:
        problems.append(f"dtype is {_dtype_name(config)!r}. Weights are written as one of {known}.")
    rope = config.rope_parameters
    if rope["rope_type"] not in _ROPE:
        problems.append(f"rope_type is {rope['rope_type']!r}. Only {[*_ROPE]} are implemented.")
    if rope.get("partial_rotary_factor", 1) != 1:
        problems.append(f"partial_rotary_factor is {rope['partial_rotary_factor']}, not 1.")
    missing = [key for key in _ROPE.get(rope["rope_type"], ()) if rope.get(key) is None]
    return problems + [f"{key} is missing beside rope_type." for key in missing]


def _dtype_name(config: LlamaConfig) -> str:
    return str(config.dtype or "float32").removeprefix("torch.")


def named_leaves(params: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of parameters with their names in files."""
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        yield name if name.startswith("lm_head") else f"model.{name}", leaf


def load(folder: Path, config: LlamaConfig, shardings: Any) -> Params:
    """Read the weights of a checkpoint.

    Args:
      folder: the checkpoint.
      config: its configuration.
      shardings: where parameters go: a tree like that of `abstract_decoder` with a `Sharding`
        at each leaf or above several leaves. Each process reads only the parts of its own devices.

    Returns:
      The parameters, float32, as `nnx.split(Decoder(...), nnx.Param)` has them.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is broken, an index names a file outside of the folder, or the tensors do
        not fit the configuration. Then the message names every tensor that is missing, unexpected,
        or of a wrong shape or dtype.
    """
    _, abstract = abstract_decoder(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(abstract)}
    places = jax.tree.leaves(jax.tree.broadcast(shardings, abstract))
    placed = dict(zip(shapes, places, strict=True))
    with ExitStack() as files:
        stored = _stored_tensors(folder, config, files)
        problems = misfits({n: tuple(t.get_shape()) for n, t in stored.items()}, shapes)
        problems += [
            f"{name} has dtype {kind}; it may be {', '.join(DTYPES)}"
            for name, tensor in stored.items()
            if name in shapes and (kind := tensor.get_dtype()) not in DTYPES
        ]
        if problems:
            listed = "\n  ".join(sorted(problems))
            raise ValueError(f"{folder} does not fit its {CONFIG}:\n  {listed}")

        def read(name: str) -> jax.Array:
            array = jax.make_array_from_callback(
                shapes[name], placed[name], lambda part: stored[name][part].astype(np.float32)
            )
            # A transfer in flight keeps its source in memory.
            return jax.block_until_ready(array)

        arrays = list(map(read, shapes))
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def _stored_tensors(folder: Path, config: LlamaConfig, files: ExitStack) -> dict[str, Any]:
    """Open the weight files of a checkpoint, and return the tensors of its decoder by name."""
    stored: dict[str, Any] = {}
    for path in weight_files(folder):
        try:
            # Memory-mapped pages would count as memory of this process, beside the copies.
            file = files.enter_context(safe_open(path, framework="np", backend="pread"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole file: {error}. {COPY_AGAIN}") from None
        for name in file.keys():  # noqa: SIM118 It is not a mapping.
            # A tied output layer may be stored too, and old files have a table of frequencies.
            is_tied = config.tie_word_embeddings and name == "lm_head.weight"
            if is_tied or name.endswith(".rotary_emb.inv_freq"):
                continue
            if name in stored:
                raise ValueError(f"{name} is in two files of {folder}. Remove one of them.")
            stored[name] = file.get_slice(name)
    return stored


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, each once, sorted by name."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}. {COPY_AGAIN}")
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(
            f'{index} has "weight_map" {where!r:.80} instead of an object with the file of each '
            f"tensor. {COPY_AGAIN}"
        )
    for name in where.values():
        if not _is_inside(folder, name):
            raise ValueError(
                f"{index} names the file {name!r}, which is not inside of {folder}. Give names "
                "relative to the folder, without '..'."
            )
    files = [folder / name for name in sorted(set(where.values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing. {COPY_AGAIN}")
    return files


def _is_inside(folder: Path, name: Any) -> bool:
    """Return whether a name in an index is that of a file in the folder or in a subfolder."""
    if not isinstance(name, str) or "\0" in name or not PurePosixPath(name).name:
        return False
    # Refused on all systems if it would leave the folder on one of them.
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.anchor or ".." in path.parts:
            return False
    # The file itself may be a link, since download caches keep files elsewhere. Folders may not.
    return (folder / name).parent.resolve().is_relative_to(folder.resolve())


def misfits(given: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """Describe how names and shapes differ from those that are wanted."""
    problems = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    problems += [f"{name} is unexpected" for name in given.keys() - wanted.keys()]
    return problems + [
        f"{name} has shape {given[name]}; it needs {wanted[name]}"
        for name in wanted.keys() & given.keys()
        if given[name] != wanted[name]
    ]


def save(
    folder: Path,
    config: LlamaConfig,
    params: Params,
    source: Path | None = None,
    *,
    shard_bytes: int | str = "5GB",
) -> None:
    """Write a model, replacing one that the folder may hold.

    All processes call this. The first one writes, and all wait for it. The files appear when they
    are complete.

    Args:
      folder: where to write; made if it does not exist.
      config: configuration of the decoder, which names the dtype of the weights.
      params: its parameters.
      source: folder that the model came from, whose tokenizer and configuration are copied.
      shard_bytes: largest size of a file, unless a single tensor is larger.

    Raises:
      ValueError: the parameters do not fit the configuration.
    """
    dtype = np.dtype(_dtype_name(config))
    tensors = dict(named_leaves(params))
    wanted = {n: leaf.shape for n, leaf in named_leaves(abstract_decoder(config)[1])}
    if problems := misfits({name: leaf.shape for name, leaf in tensors.items()}, wanted):
        raise ValueError("params do not fit config:\n  " + "\n  ".join(sorted(problems)))
    shards = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda leaf: leaf.size * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        get_storage_id=lambda leaf: None,
        max_shard_size=shard_bytes,
    )
    writes = jax.process_index() == 0
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
        new = Path(scratch)
        for file, names in shards.filename_to_tensors.items():
            content = {name: _on_host(tensors[name], dtype) for name in names}
            if writes:
                # Other libraries expect the name of a framework; the layout is that of PyTorch.
                save_file(content, new / file, metadata={"format": "pt"})
        if writes:
            if shards.is_sharded:
                index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
                (new / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
            config.to_json_file(new / CONFIG)
            for name in COPIED if source is not None else ():
                # A file that the source lacks must not stay from an earlier model.
                (folder / name).unlink(missing_ok=True)
                if (source / name).is_file():
                    shutil.copy(source / name, new / name)
            for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
                old.unlink(missing_ok=True)
            for made in new.iterdir():
                shutil.move(made, folder / made.name)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoint saved")


def _on_host(leaf: Any, dtype: jnp.dtype) -> np.ndarray:
    """Return a whole parameter, which may be spread over the devices of several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.ascontiguousarray(np.asarray(leaf).astype(dtype, copy=False))
