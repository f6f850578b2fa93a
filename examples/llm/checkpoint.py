"""Hugging Face checkpoint folders: `config.json` beside one or several safetensors files.

Tensors are read a few at a time, the largest first, and placed at once on their devices, so that a
process never holds much more than its own share of the checkpoint.
"""

import json
import math
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from examples.llm.config import DecoderConfig
from examples.llm.json_files import read_object
from examples.llm.model import abstract_params
from examples.llm.stored_tensors import DTYPES, StoredTensor, find_tensors
from examples.llm.tensor_names import hf_name, named_leaves
from examples.llm.weight_files import INDEX, SINGLE

CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9
READERS = 4

Params = Any  # An `nnx.State` of the decoder's parameters, or the same as a tree of dicts.
Shardings = Any  # A Sharding, a tree of them, or a function from a parameter's name to one.


def read_config(folder: Path) -> DecoderConfig:
    """Read the configuration of a checkpoint.

    Args:
      folder: the checkpoint.

    Returns:
      The shape of its decoder.

    Raises:
      FileNotFoundError: there is no config.json.
      ValueError: config.json is broken, or its network is not implemented.
    """
    return DecoderConfig.from_hf(read_object(folder / CONFIG))


def load(
    folder: str | Path, *, dtype: DTypeLike | None = None, shardings: Shardings | None = None
) -> tuple[DecoderConfig, nnx.State]:
    """Read a checkpoint.

    Args:
      folder: the checkpoint.
      dtype: dtype to convert parameters to; None keeps the dtype of each tensor.
      shardings: where parameters go: a tree like `abstract_params(config)` with a `Sharding` at
        each leaf or above several leaves, or a function from a name such as
        "blocks.0.attention.query.weight" to one; None for the default device. Each process reads
        only the parts of its own devices.

    Returns:
      The configuration, and the parameters as `nnx.split(Decoder(...), nnx.Param)` has them.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is broken, an index names a file outside of the folder, or the tensors do
        not fit `config.json`. Then the message names every tensor that is missing, unexpected, or
        of a wrong shape or dtype.
    """
    folder = Path(folder)
    config = read_config(folder)
    abstract = abstract_params(config)
    shapes = {name: leaf.shape for name, leaf in named_leaves(abstract)}
    placed = _shardings_by_name(shardings, abstract)
    with ExitStack() as files:
        found = find_tensors(folder, config, files)
        _check(folder, found, {hf_name(name, config.family): s for name, s in shapes.items()})
        # The last tensors are copied when all others are in memory, so these are small ones.
        order = sorted(shapes, key=lambda name: math.prod(shapes[name]), reverse=True)
        # Some tensors are copied while others wait for storage.
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
    """Write a checkpoint, replacing one that the folder may hold.

    All processes call this. The first one writes, and all wait for it. The files appear when they
    are complete.

    Args:
      folder: where to write; made if it does not exist.
      config: shape of the decoder.
      params: its parameters.
      dtype: dtype to convert them to; None keeps the dtype of each parameter.
      shard_bytes: largest size of a file, unless a single tensor is larger.

    Raises:
      ValueError: the parameters do not fit the configuration, or have a dtype that `load` refuses.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}. Give at least 1.")
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
                # Other libraries expect the name of a framework; the layout is that of PyTorch.
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


# ---------------------------------------------------------------------------------------- reading


def _misfits(found: Mapping[str, tuple], wanted: Mapping[str, tuple]) -> list[str]:
    """Describe how names and shapes differ from those that are wanted."""
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    problems += [f"{name} is unexpected" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {found[name]}; it needs {wanted[name]}"
        for name in wanted.keys() & found.keys()
        if found[name] != wanted[name]
    ]
    return problems


def _check(folder: Path, found: Mapping[str, StoredTensor], wanted: Mapping[str, tuple]) -> None:
    """Raise ValueError unless files hold exactly the tensors of a decoder."""
    problems = _misfits({name: tensor.shape for name, tensor in found.items()}, wanted)
    problems += [
        f"{name} has dtype {found[name].dtype}; it may be {', '.join(DTYPES)}"
        for name in wanted.keys() & found.keys()
        if found[name].dtype not in DTYPES
    ]
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise ValueError(f"{folder} does not fit its {CONFIG}:\n  {listed}")


def _read(tensor: StoredTensor, sharding: Sharding, dtype: DTypeLike | None) -> jax.Array:
    """Read the parts of a tensor that belong on the devices of this process."""
    wanted = DTYPES[tensor.dtype] if dtype is None else dtype

    def part(index: tuple[slice, ...]) -> np.ndarray:
        return tensor[index].astype(wanted, copy=False)

    array = jax.make_array_from_callback(tensor.shape, sharding, part)
    # A transfer in flight keeps its source in memory.
    return jax.block_until_ready(array)


def _shardings_by_name(shardings: Shardings | None, abstract: Params) -> dict[str, Sharding]:
    """Return the sharding of each parameter."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    names = [name for name, _ in named_leaves(abstract)]
    if callable(shardings):
        return {name: shardings(name) for name in names}
    leaves = jax.tree.leaves(jax.tree.broadcast(shardings, abstract))
    return dict(zip(names, leaves, strict=True))


# ---------------------------------------------------------------------------------------- writing


def _check_saved(leaves: Mapping[str, Any], config: DecoderConfig, dtype: DTypeLike | None) -> None:
    """Raise ValueError for parameters that `load` would refuse to read."""
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
    """Split the list of tensors where a file would become larger than `limit` bytes."""
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
    """Return names for `count` files, as Hugging Face numbers them."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _on_host(leaf: Any, dtype: DTypeLike | None) -> np.ndarray:
    """Return a whole parameter, which may be spread over the devices of several processes."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.ascontiguousarray(np.asarray(leaf).astype(dtype or leaf.dtype, copy=False))


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _replace_files(new: Path, folder: Path) -> None:
    """Move finished files into a folder, and remove all weights that it had."""
    for old in [folder / INDEX, *folder.glob("model*.safetensors")]:
        old.unlink(missing_ok=True)
    for file in new.iterdir():
        shutil.move(file, folder / file.name)
