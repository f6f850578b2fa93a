"""Transports: stores of named bytes that all islands reach."""

import contextlib
import dataclasses
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger("dynamiq_jax.islands")
_CREDENTIALS = re.compile("Credential|Authentication")


class Transport(Protocol):
    """A store of named bytes. Names have parts between slashes, such as "change/7/east"."""

    def put(self, name: str, data: bytes) -> bool:
        """Store bytes, all at once, unless there are some of this name.

        Returns:
          Whether they were stored. Of several calls at once, exactly one returns True.
        """

    def get(self, name: str) -> bytes | None:
        """Return the bytes of a name, or None if there are none."""

    def names(self, folder: str) -> list[str]:
        """Return the last parts of the names in a folder, such as ["east"] of "change/7"."""

    def delete(self, name: str) -> None:
        """Forget a name and its bytes, if there are any; only for `Islands(keep_rounds=)`."""


@dataclasses.dataclass(frozen=True)
class SharedFolder:
    """A folder of a local or network file system.

    >>> folder = SharedFolder(tempfile.mkdtemp())
    >>> folder.put("a/b", b"1"), folder.put("a/b", b"2"), folder.get("a/b"), folder.names("a")
    (True, False, b'1', ['b'])
    """

    path: str | os.PathLike[str]

    def put(self, name: str, data: bytes) -> bool:
        """Store bytes; see `Transport.put`. A link is atomic, also over NFS."""
        target = Path(self.path, name)
        Path(self.path).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=".") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a host that loses power leaves a name without bytes
            try:
                return _linked(file.name, target)
            except FileNotFoundError:  # another island has deleted the folder, which was empty
                return _linked(file.name, target)

    def get(self, name: str) -> bytes | None:
        """Return bytes; see `Transport.get`."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self.path, name).read_bytes()
        return None

    def names(self, folder: str) -> list[str]:
        """Return names; see `Transport.names`. Hidden files are of systems, such as NFS."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(n for n in os.listdir(Path(self.path, folder)) if not n.startswith("."))
        return []

    def delete(self, name: str) -> None:
        """Forget a name; see `Transport.delete`. Folders that are empty then go, too."""
        target = Path(self.path, name)
        target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the first that is not empty
            for folder in target.relative_to(self.path).parents[:-1]:
                Path(self.path, folder).rmdir()


def _linked(source: str, target: Path) -> bool:
    """Give a file another name, and return whether no other file has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class ObjectStore:
    """A folder of an object store, through a file system of `fsspec`.

        ObjectStore(fsspec.filesystem("s3"), "bucket/run-1")

    Its `pipe_file(..., mode="create")` must be atomic, as a conditional write of S3 is. That of
    local files is not: use `SharedFolder` for these.

    A call that fails is repeated by `tenacity`, and logged: time-outs, throttling (503) and a store
    that is down end no island. A missing permission and an expired credential end it at once.
    """

    filesystem: Any = dataclasses.field(repr=False)  # fsspec.AbstractFileSystem
    path: str
    patience: float = 600.0  # seconds after which a call that fails again and again is an error

    def __post_init__(self) -> None:
        if not hasattr(self.filesystem, "pipe_file"):
            raise TypeError(
                f"filesystem={self.filesystem!r:.80} is no file system of fsspec. Give one, such "
                "as fsspec.filesystem('s3')."
            )

    def put(self, name: str, data: bytes) -> bool:
        """Store bytes; see `Transport.put`."""
        try:
            self._patiently(self.filesystem.pipe_file, f"{self.path}/{name}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, name: str) -> bytes | None:
        """Return bytes; see `Transport.get`."""
        try:
            data: bytes = self._patiently(self.filesystem.cat_file, f"{self.path}/{name}")
        except FileNotFoundError:
            return None
        return data

    def names(self, folder: str) -> list[str]:
        """Return names; see `Transport.names`."""
        self.filesystem.invalidate_cache()  # others write too
        try:
            paths = self._patiently(self.filesystem.ls, f"{self.path}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, name: str) -> None:
        """Forget a name; see `Transport.delete`."""
        with contextlib.suppress(FileNotFoundError):
            self._patiently(self.filesystem.rm_file, f"{self.path}/{name}")

    def _patiently(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the store until it has an answer."""
        try:
            import tenacity
        except ImportError:
            raise ImportError(
                "ObjectStore repeats calls that fail by tenacity, which is not installed. Run "
                "`pip install 'dynamiq-jax[stores]'`."
            ) from None
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=10),
            stop=tenacity.stop_after_delay(self.patience),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        return retrying(function, *args, **options)


def _may_pass(error: BaseException) -> bool:
    """Return whether an error may be that of a store which answers later."""
    if _CREDENTIALS.search(type(error).__name__):  # as packages of stores call missing ones
        return False
    answers = (FileNotFoundError, FileExistsError, PermissionError)
    mistakes = (AttributeError, NotImplementedError, TypeError, ValueError)
    return isinstance(error, Exception) and not isinstance(error, answers + mistakes)
