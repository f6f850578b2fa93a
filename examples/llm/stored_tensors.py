"""Tensors in safetensors files, which are read whole or in parts."""

import dataclasses
import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from examples.llm.config import DecoderConfig
from examples.llm.json_files import COPY_AGAIN
from examples.llm.tensor_names import plain_name
from examples.llm.weight_files import weight_files

DTYPES = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in an open file."""

    file: Any  # as `safe_open` returns it
    stored_name: str
    shape: tuple[int, ...]
    dtype: str  # as files spell it: a key of DTYPES, or one that is not supported
    path: Path  # of the file
    start: int  # of the tensor's bytes in the file

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a part of the tensor."""
        if any(part != slice(None) for part in index):
            return self.file.get_slice(self.stored_name)[index]
        # JAX keeps aligned memory as it is on a CPU; a copy would take as much memory again.
        dtype = np.dtype(DTYPES[self.dtype])
        content = _aligned(math.prod(self.shape) * dtype.itemsize)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            done = 0
            while done < content.size:
                count = file.readinto(content.data[done:])
                if not count:
                    raise ValueError(f"{self.path} became shorter while it was read.")
                done += count
        return content.view(dtype).reshape(self.shape)


def find_tensors(folder: Path, config: DecoderConfig, files: ExitStack) -> dict[str, StoredTensor]:
    """Open the weight files of a checkpoint and list the tensors of its decoder.

    Args:
      folder: the checkpoint.
      config: its configuration.
      files: closes the files.

    Returns:
      The tensors by their names in a file of the language model alone.

    Raises:
      FileNotFoundError: there are no weights, or a file is missing.
      ValueError: a file is broken, or a tensor is in two files.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        try:
            # Memory-mapped pages would count as memory of this process, beside the copies.
            file = files.enter_context(safe_open(path, framework="np", backend="pread"))
        except SafetensorError as error:
            raise ValueError(
                f"{path} is not a complete safetensors file: {error}. {COPY_AGAIN}"
            ) from error
        starts = _starts(path)
        for stored_name in file.keys():  # noqa: SIM118 It is not a mapping.
            name = plain_name(stored_name, config)
            if name is None:
                continue
            if name in found:
                raise ValueError(f"{name} is in two files of {folder}. Remove one of them.")
            stored = file.get_slice(stored_name)
            found[name] = StoredTensor(
                file=file,
                stored_name=stored_name,
                shape=tuple(stored.get_shape()),
                dtype=stored.get_dtype(),
                path=path,
                start=starts[stored_name],
            )
    return found


def _starts(path: Path) -> dict[str, int]:
    """Read where the bytes of each tensor start in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _aligned(size: int) -> np.ndarray:
    """Allocate uint8 [size] that starts at a multiple of 64 bytes."""
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]
