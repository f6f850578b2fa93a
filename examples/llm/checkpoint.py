"""Hugging Face checkpoint folders: `config.json` beside one or several safetensors files.

Tensors are read a few at a time, the largest first, and placed at once where they are to stay, so
that a process never holds much more than its own share of the checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from examples.llm.config import DecoderConfig, Family
from examples.llm.json_files import read_object
from examples.llm.model import abstract_params
from examples.llm.weight_files import INDEX, SINGLE, weight_files

CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9
READERS = 4
DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}

Params = Any  # An `nnx.State` of the decoder's parameters, or the same as a tree of dicts.
Shardings = Any  # A Sharding, a tree of them, or a function from a parameter's name to one.


def read_config(folder: Path) -> DecoderConfig:
    """Read the configuration of a checkpoint.

    Args:
      folder: the checkpoint.

    Returns:
      Shape of its decoder.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: config.json is broken, or describes a network that is not built here.
    """
    return DecoderConfig.from_hf(read_object(folder / CONFIG))


def load(
    folder: str | Path, *, dtype: DTypeLike | None = None, shardings: Shardings | None = None
) -> tuple[DecoderConfig, nnx.State]:
    """Reads a checkpoint.

    Args:
        folder: Where it is.
        dtype: What to convert parameters to; None keeps the dtype of each tensor.
        shardings: Where parameters go: a tree like `abstract_params(config)` with a `Sharding` at
            every leaf or above several, or a function from a name such as
            "blocks.0.attention.query.weight" to one. Every process reads only the parts of its
            own devices. None for the default device.

    Returns:
        The configuration, and the parameters as `nnx.split(Decoder(...), nnx.Param)` has them.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A JSON file is broken, or names a file outside of the folder; or the files do
            not hold what `config.json` promises: the message names every tensor that is missing,
            unexpected, or has a wrong shape or dtype.
    """
    folder = Path(folder)
    config = read_config(folder)
    abstract = abstract_params(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(abstract)}
    placed = _shardings_by_name(shardings, abstract)
    with ExitStack() as files:
        found = _find_tensors(folder, config, files)
        _check(folder, found, {hf_name(name, config.family): s for name, s in shapes.items()})
        # The last tensors are copied beside all others in memory, so these should be small ones.
        order = sorted(shapes, key=lambda name: math.prod(shapes[name]), reverse=True)
        # Several at once, so that some are copied while others wait for storage.
        with ThreadPoolExecutor(READERS) as readers:
            read = readers.map(
                lambda name: _read(found[hf_name(name, config.family)], placed[name], dtype), order
            )
            arrays = dict(zip(order, read, strict=True))
    leaves = [arrays[name] for name in shapes]
    return config, jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def save(
    folder: str | Path,
    config: DecoderConfig,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a checkpoint, in place of one that the folder may hold.

    With several processes all of them call this, the first one writes, and all wait for it. The
    files appear when they are complete.

    Args:
        folder: Where to; made if it does not exist.
        config: Shape of the decoder.
        params: Its parameters.
        dtype: What to convert them to; None keeps the dtype of each one.
        shard_bytes: Start another file rather than make one larger than this; a single tensor
            may be.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it has to be at least 1.")
    leaves = dict(named_leaves(params))
    _check_saved(leaves, config, dtype)
    tensors = {hf_name(name, config.family): leaf for name, leaf in leaves.items()}
    sizes = {
        name: leaf.size * np.dtype(leaf.dtype if dtype is None else dtype).itemsize
        for name, leaf in tensors.items()
    }
    shards = _shards(sizes, shard_bytes)
    names = _file_names(len(shards))
    writes = jax.process_index() == 0
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".saving-") as scratch:
        for file, shard in zip(names, shards, strict=True):
            content = {name: _on_host(tensors[name], dtype) for name in shard}
            if writes:
                # Other readers want to be told a framework; the layout is that of PyTorch.
                save_file(content, Path(scratch, file), metadata={"format": "pt"})
        if writes:
            if len(shards) > 1:
                where = {name: f for f, shard in zip(names, shards, strict=True) for name in shard}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
                _write_json(Path(scratch, INDEX), index)
            _write_json(Path(scratch, CONFIG), config.to_hf())
            _replace_files(Path(scratch), folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoint saved")


# ------------------------------------------------------------------------------------------ names

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_COMMON = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_INSIDE: dict[Family, dict[str, str]] = {
    "llama": _COMMON | {"mlp_norm": "post_attention_layernorm"},
    "gemma3": _COMMON
    | {
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}

# Files with an image encoder put the language model one level down; old Llama files list a table.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_SKIPPED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*\.rotary_emb\.inv_freq$")


def named_leaves(params: Params) -> Iterator[tuple[str, Any]]:
    """Leaves of parameters with names such as "blocks.0.attention.query.weight"."""
    for path, leaf in jax.tree.leaves_with_path(params):
        yield jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), leaf


def hf_name(name: str, family: Family) -> str:
    """The name that files have for a parameter."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, inside = name.removesuffix(".weight").split(".", 2)
    return f"model.layers.{layer}.{_INSIDE[family][inside]}.weight"


def _plain_name(stored: str, config: DecoderConfig) -> str | None:
    """A tensor's name in a file of the language model alone; None where it has no part in it."""
    if _SKIPPED.match(stored) or (config.tie_embeddings and stored.endswith("lm_head.weight")):
        return None
    for prefix, plain in _PREFIXES:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


# ---------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Tensor:
    """A tensor of an open file, of which indexing reads a part; its dtype as files spell it."""

    file: Any
    stored_name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    start: int  # of its bytes in the file

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if any(part != slice(None) for part in index):
            return self.file.get_slice(self.stored_name)[index]
        # Read to where JAX, on a CPU, can leave it: a copy would touch as much memory again.
        dtype = np.dtype(DTYPES[self.dtype])
        bits = _aligned(math.prod(self.shape) * dtype.itemsize)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            done = 0
            while done < bits.size:
                count = file.readinto(bits.data[done:])
                if not count:
                    raise ValueError(f"{self.path} became shorter while it was read.")
                done += count
        return bits.view(dtype).reshape(self.shape)


def _aligned(size: int) -> np.ndarray:
    """uint8 [size], not initialised, that starts at a multiple of 64 bytes."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _starts(path: Path) -> dict[str, int]:
    """Where the bytes of each tensor start in a file of safetensors, by its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _find_tensors(folder: Path, config: DecoderConfig, files: ExitStack) -> dict[str, _Tensor]:
    """Opens all files and lists what they hold."""
    found = {}
    for file in weight_files(folder):
        try:
            # Mapped pages would count as memory of this process on top of the copies.
            opened = files.enter_context(safe_open(file, framework="np", backend="pread"))
        except SafetensorError as error:
            raise ValueError(
                f"{file} is no complete safetensors file: {error}. Copy or download it again."
            ) from error
        starts = _starts(file)
        for stored_name in opened.keys():  # noqa: SIM118 It is no mapping.
            name = _plain_name(stored_name, config)
            if name is None:
                continue
            if name in found:
                raise ValueError(f"{name} is in two files of {folder}; remove one of them.")
            stored = opened.get_slice(stored_name)
            shape = tuple(stored.get_shape())
            found[name] = _Tensor(
                opened, stored_name, shape, stored.get_dtype(), file, starts[stored_name]
            )
    return found


def _misfits(found: Mapping[str, tuple], wanted: Mapping[str, tuple]) -> list[str]:
    """Where names and shapes are not those that are wanted, in words."""
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    problems += [f"{name} is unexpected" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {found[name]}; it needs {wanted[name]}"
        for name in wanted.keys() & found.keys()
        if found[name] != wanted[name]
    ]
    return problems


def _check(folder: Path, found: Mapping[str, _Tensor], wanted: Mapping[str, tuple]) -> None:
    """Refuses files that do not hold exactly the tensors of a decoder, and names the others."""
    problems = _misfits({name: tensor.shape for name, tensor in found.items()}, wanted)
    problems += [
        f"{name} has dtype {found[name].dtype}; it may be {', '.join(DTYPES)}"
        for name in wanted.keys() & found.keys()
        if found[name].dtype not in DTYPES
    ]
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise ValueError(f"{folder} does not fit its {CONFIG}:\n  {listed}")


def _read(tensor: _Tensor, sharding: Sharding, dtype: DTypeLike | None) -> jax.Array:
    """Reads the parts of a tensor that this process has devices for."""
    wanted = DTYPES[tensor.dtype] if dtype is None else dtype

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return tensor[index].astype(wanted, copy=False)

    array = jax.make_array_from_callback(tensor.shape, sharding, part)
    # Each transfer in flight keeps its source in memory.
    return jax.block_until_ready(array)


def _shardings_by_name(shardings: Shardings | None, abstract: Params) -> dict[str, Sharding]:
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    names = [name for name, _ in named_leaves(abstract)]
    if callable(shardings):
        return {name: shardings(name) for name in names}
    leaves = jax.tree.leaves(jax.tree.broadcast(shardings, abstract))
    return dict(zip(names, leaves, strict=True))


# ---------------------------------------------------------------------------------------- writing


def _check_saved(leaves: Mapping[str, Any], config: DecoderConfig, dtype: DTypeLike | None) -> None:
    """Refuses parameters that `load` would refuse to read."""
    wanted = {name: leaf.shape for name, leaf in named_leaves(abstract_params(config))}
    problems = _misfits({name: leaf.shape for name, leaf in leaves.items()}, wanted)
    problems += [
        f"{name} would have dtype {saved}; it may be bfloat16, float16, float32"
        for name in wanted.keys() & leaves.keys()
        if (saved := np.dtype(leaves[name].dtype if dtype is None else dtype))
        not in map(np.dtype, DTYPES.values())
    ]
    if problems:
        raise ValueError("params do not fit config:\n  " + "\n  ".join(sorted(problems)))


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cuts the list of tensors where a file would become larger than `limit` bytes."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _on_host(leaf: Any, dtype: DTypeLike | None) -> np.ndarray:
    """The whole of a parameter, which may be spread over the devices of several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.ascontiguousarray(np.asarray(leaf).astype(dtype or leaf.dtype, copy=False))


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _replace_files(new: Path, folder: Path) -> None:
    """Moves finished files to where an older checkpoint may be, of which no weights stay."""
    for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    for file in new.iterdir():
        shutil.move(file, folder / file.name)
