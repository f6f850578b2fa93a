"""Files of a run in its store: bytes under a checksum, changes and decisions."""

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

from dynamiq_jax.islands.merging import check_weight
from dynamiq_jax.islands.messages import Message

_MAGIC = b"DQIS"
_CHECKSUM = slice(len(_MAGIC), len(_MAGIC) + hashlib.sha256().digest_size)
_WEIGHT = struct.Struct("<d")  # before the message of a change


def sealed(file: str, content: bytes) -> bytes:
    """Return the bytes of a file: a checksum of its name and its content, and the content."""
    return _MAGIC + _checksum(file, content) + content


def opened(file: str, data: bytes | None) -> bytes:
    """Return the content of a file.

    Files of dynamiq-jax 0.2.0 have no checksum: they are their content.

    Raises:
      ValueError: a file that is gone, cut or altered, or the bytes of another file.
    """
    if data is None:
        raise ValueError("the file is gone.")
    if data[: _CHECKSUM.start] != _MAGIC:
        return data
    content = data[_CHECKSUM.stop :]
    if data[_CHECKSUM] != _checksum(file, content):
        raise ValueError(
            f"the checksum of {len(data)} bytes is wrong. They are cut, altered or of another file."
        )
    return content


def digest_of(data: bytes) -> str:
    """Return the digest of a file, by which a decision names its bytes."""
    return hashlib.sha256(data).hexdigest()


def _checksum(file: str, content: bytes) -> bytes:
    digest = hashlib.sha256(file.encode() + b"\0")
    digest.update(content)
    return digest.digest()


class Change(NamedTuple):
    """Change of an island in a round."""

    weight: float
    message: Message

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return _WEIGHT.pack(self.weight) + self.message.to_bytes()

    @staticmethod
    def from_bytes(content: bytes) -> "Change":
        """Check and read the content of a file.

        Raises:
          ValueError: no change, or a damaged one.
        """
        if len(content) < _WEIGHT.size:
            raise ValueError(f"{len(content)} bytes are no change.")
        (weight,) = _WEIGHT.unpack_from(content)
        check_weight("weight", weight)
        return Change(weight, Message.from_bytes(content[_WEIGHT.size :]))


class Decision(NamedTuple):
    """Decision about a round."""

    reference: str  # hash of the state that the round began at
    # Islands whose changes count, with the digests of their files; None in dynamiq-jax 0.2.0.
    members: Mapping[str, str | None]
    left_out: Mapping[str, str]  # islands whose changes came and do not count, with the reason

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return json.dumps(self._asdict()).encode()

    @staticmethod
    def from_bytes(content: bytes) -> "Decision":
        """Check and read the content of a file.

        Raises:
          ValueError: no decision.
        """
        try:
            fields = json.loads(content)
            members, left_out = fields["members"], fields.get("left_out", {})
            if isinstance(members, list):  # of dynamiq-jax 0.2.0
                members = dict.fromkeys(members)
            return Decision(fields["reference"], dict(members), dict(left_out))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{len(content)} bytes are no decision: {error!r:.100}.") from None
