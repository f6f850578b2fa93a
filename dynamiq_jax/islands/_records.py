"""Files of a run in its store: bytes under a checksum, changes and decisions."""

import hashlib
import hmac
import json
import re
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dynamiq_jax.islands._shards import Shard
from dynamiq_jax.islands.merging import check_weight
from dynamiq_jax.islands.messages import Message
from dynamiq_jax.islands.messages.message import MAGIC

_MAGIC, _SIGNED = b"DQIS", b"DQIH"
_CHECKSUM = slice(len(_MAGIC), len(_MAGIC) + hashlib.sha256().digest_size)
_WEIGHT = struct.Struct("<d")  # before the message of a change, or the list of its parts
_PARTS, _DIGEST = b"DQPT", re.compile("[0-9a-f]{64}")
LONGEST_NAME = 200  # bytes of the name of an island; of files it may have 255
_MOST_LISTED = 1 << 26  # bytes of a list of parts: a damaged one inflates to no more


def sealed(file: str, content: bytes, secret: bytes | None = None) -> bytes:
    """Return the bytes of a file: a checksum of its name and its content, and the content.

    With the secret of all islands, the checksum is a signature (HMAC-SHA256).
    """
    magic = _MAGIC if secret is None else _SIGNED
    return magic + _checksum(file, content, secret) + content


def opened(file: str, data: bytes | None, secret: bytes | None = None) -> bytes:
    """Return the content of a file.

    Files of dynamiq-jax 0.2.0 have no checksum: they are their content.

    Raises:
      ValueError: a file that is gone, cut or altered, the bytes of another file, or one without the
        signature of the secret.
    """
    if data is None:
        raise ValueError("the file is gone.")
    magic = data[: _CHECKSUM.start]
    if secret is not None and magic != _SIGNED:
        raise ValueError("it has no signature. Give all islands the same secret.")
    if secret is None and magic == _SIGNED:
        raise ValueError("it has a signature. Give the secret of the other islands.")
    if magic not in (_MAGIC, _SIGNED):
        return data
    content = data[_CHECKSUM.stop :]
    if not hmac.compare_digest(data[_CHECKSUM], _checksum(file, content, secret)):
        if secret is not None:
            raise ValueError("its signature is wrong: it is altered, or of another secret or file.")
        raise ValueError(
            f"the checksum of {len(data)} bytes is wrong. They are cut, altered or of another file."
        )
    return content


def digest_of(data: bytes) -> str:
    """Return the digest of a file, by which a decision names its bytes."""
    return hashlib.sha256(data).hexdigest()


def _checksum(file: str, content: bytes, secret: bytes | None) -> bytes:
    head = file.encode() + b"\0"
    digest = hashlib.sha256(head) if secret is None else hmac.new(secret, head, hashlib.sha256)
    digest.update(content)
    return digest.digest()


class SentPart(NamedTuple):
    """Part of a tree, in a file of its own: what one device of an island holds."""

    number: int  # of the device among those of its island
    digest: str  # of the bytes of the file
    shards: tuple[Shard, ...]

    @property
    def name(self) -> str:
        """Name of the file, with the digest: an island that starts again finds none of its name."""
        return f"{self.number}-{self.digest[:16]}"


class Sent(NamedTuple):
    """A tree that an island has sent: its change in a round, or a state."""

    weight: float
    island: str  # whose parts they are
    message: Message | None  # whole leaves; None if they are in parts
    parts: tuple[SentPart, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        head = _WEIGHT.pack(self.weight)
        if self.message is not None:
            return head + self.message.to_bytes()
        listed = [[part.number, part.digest, [s.name for s in part.shards]] for part in self.parts]
        return head + _PARTS + zlib.compress(json.dumps([self.island, listed]).encode())

    @staticmethod
    def from_bytes(content: bytes, island: str) -> "Sent":
        """Check and read what `to_bytes` returned, or the bytes of a message alone.

        A list of parts names the island that has sent it.

        Raises:
          ValueError: no change and no state, or a damaged one.
        """
        if content.startswith(MAGIC):  # a state
            return Sent(1.0, island, Message.from_bytes(content))
        if len(content) < _WEIGHT.size:
            raise ValueError(f"{len(content)} bytes are no change.")
        (weight,) = _WEIGHT.unpack_from(content)
        check_weight("weight", weight)
        body = content[_WEIGHT.size :]
        if not body.startswith(_PARTS):
            return Sent(weight, island, Message.from_bytes(body))
        try:
            reader = zlib.decompressobj()
            sender, listed = json.loads(
                reader.decompress(body[len(_PARTS) :], max_length=_MOST_LISTED)
            )
            parts = tuple(
                SentPart(int(number), str(digest), tuple(map(Shard.named, names)))
                for number, digest, names in listed
            )
        except (AttributeError, RecursionError, TypeError, ValueError, zlib.error) as error:
            raise ValueError(f"{len(content)} bytes list no parts: {error!r:.100}.") from None
        if not is_file_name(sender) or not all(_DIGEST.fullmatch(part.digest) for part in parts):
            raise ValueError(f"{len(content)} bytes list parts that no island has.")
        return Sent(weight, sender, None, parts)


def is_file_name(name: Any) -> bool:
    """Return whether an island can have a name: stores have files under it."""
    if not isinstance(name, str) or not name or name.startswith("."):
        return False
    return name.isprintable() and "/" not in name and len(name.encode()) <= LONGEST_NAME


class RoundNotes(NamedTuple):
    """Notes of the island that decided a round, which decide nothing."""

    by: str  # its name
    waited: float  # seconds from its own change to the decision
    sizes: Mapping[str, int]  # bytes of the changes that came
    losses: Mapping[str, float]  # of the islands that told theirs

    @staticmethod
    def of(notes: Mapping[str, Any]) -> "RoundNotes":
        """Read notes, of which any may be missing."""
        nothing: dict[str, Any] = {"by": "", "waited": 0.0, "sizes": {}, "losses": {}}
        return RoundNotes(**(nothing | {name: notes[name] for name in nothing if name in notes}))


class Decision(NamedTuple):
    """Decision about a round."""

    reference: str  # hash of the state that the round began at
    # Islands whose changes count, with the digests of their files; None in dynamiq-jax 0.2.0.
    members: Mapping[str, str | None]
    left_out: Mapping[str, str]  # islands whose changes came and do not count, with the reason
    # Factors below 1 of changes whose norms are above the median.
    factors: Mapping[str, float] = MappingProxyType({})
    notes: Mapping[str, Any] = MappingProxyType({})  # for people: see `RoundNotes`

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        return json.dumps(self._asdict(), default=dict).encode()

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
            factors = {name: float(of) for name, of in fields.get("factors", {}).items()}
            if not all(0 < factor <= 1 for factor in factors.values()):
                raise ValueError(f"factors={factors!r:.100} are not between 0 and 1")
            notes = dict(fields.get("notes", {}))
            return Decision(fields["reference"], dict(members), dict(left_out), factors, notes)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{len(content)} bytes are no decision: {error!r:.100}.") from None
