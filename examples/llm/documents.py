"""Documents in files. Each is a plain text or a chat.

notes.txt     one document
chats.jsonl   one document per line: {"text": "..."} or
              {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """A message of a chat."""

    role: str
    content: str


Document = str | tuple[Turn, ...]


def read_documents(path: Path, option: str) -> list[Document]:
    """Read a file of documents.

    Args:
      path: a .jsonl file, or a text file with any other name.
      option: option that names the file, for errors.

    Returns:
      The documents that are not empty, in the order of the file.

    Raises:
      ValueError: there is no such file, a line is not a document, or all documents are empty.
    """
    if not path.is_file():
        raise ValueError(f"{option} is {path}: there is no such file. Give a .txt or .jsonl file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} is {path}: it is not UTF-8 text. Convert it first.") from None
    documents: list[Document] = [text]
    if path.suffix == ".jsonl":
        # `splitlines` would also split at line separators inside JSON strings.
        lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        documents = [_parse(line, f"{option} {path}, line {n}") for n, line in lines]
    documents = [document for document in documents if _has_text(document)]
    if not documents:
        raise ValueError(f"{option} is {path}: it has no text. Give a file with text.")
    return documents


def hold_out(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Split off the last part of the documents, to evaluate on.

    Args:
      documents: at least one document. A single text is split after a line.
      share: share to hold out, between 0 and 1.

    Returns:
      Documents to train on and documents to evaluate on, at least one of each.

    Raises:
      ValueError: there is a single document that cannot be split.
    """
    if len(documents) > 1:
        count = min(max(round(share * len(documents)), 1), len(documents) - 1)
        return documents[:-count], documents[-count:]
    text = documents[0]
    cut = text.find("\n", round(len(text) * (1 - share))) + 1 if isinstance(text, str) else 0
    if cut == 0 or not text[cut:].strip():
        raise ValueError(
            "--data is a single document, and its last part has no line break to split it at, so "
            "that nothing is left to evaluate on. Give --evaluation-data FILE."
        )
    return [text[:cut]], [text[cut:]]


def _parse(line: str, where: str) -> Document:
    """Parse one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}). Write one object per line.") from None
    keys = sorted(record) if isinstance(record, dict) else type(record).__name__
    match record:
        case {"messages": list(messages), **rest} if "text" not in rest:
            return tuple(_turn(message, where) for message in messages)
        case {"text": str(text), **rest} if "messages" not in rest:
            return text
    raise ValueError(
        f'{where}: {keys} instead of an object with a string "text" or a list "messages". '
        "Give exactly one of these."
    )


def _turn(message: Any, where: str) -> Turn:
    """Parse a message of a chat."""
    match message:
        case {"role": str(role), "content": str(content)} if role in ROLES:
            return Turn(role, content)
    raise ValueError(
        f"{where}: a message is {json.dumps(message)[:80]}. Give each message a string "
        f'"content" and a "role" of {", ".join(ROLES)}.'
    )


def _has_text(document: Document) -> bool:
    return bool(document.strip()) if isinstance(document, str) else bool(document)
