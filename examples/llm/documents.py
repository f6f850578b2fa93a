"""Training text in files: documents, each of which is a plain text or a chat.

notes.txt     one document
chats.jsonl   one document a line: {"text": "..."} or
              {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROLES = ("system", "user", "assistant")


class Turn(NamedTuple):
    """What one side of a chat says."""

    role: str
    content: str


Document = str | tuple[Turn, ...]


def read_documents(path: Path, option: str) -> list[Document]:
    """Reads a file of documents.

    Args:
        path: A .jsonl file, or a text file of any other name.
        option: The option that named the file, for errors.

    Returns:
        The documents that are not empty, in the order of the file.

    Raises:
        ValueError: There is no such file, a line is something else, or nothing is in it.
    """
    if not path.is_file():
        raise ValueError(f"{option} is {path}: there is no such file. Give a .txt or .jsonl file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(
            f"{option} is {path}: its bytes are not text in UTF-8. Convert it first."
        ) from None
    documents: list[Document] = [text]
    if path.suffix == ".jsonl":
        # Not splitlines(), which would also cut at line separators inside of JSON strings.
        lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
        documents = [_parse(line, f"{option} {path}, line {n}") for n, line in lines]
    documents = [document for document in documents if _has_text(document)]
    if not documents:
        raise ValueError(f"{option} is {path}: there is no text in it. Give a file with some.")
    return documents


def hold_out(documents: list[Document], share: float) -> tuple[list[Document], list[Document]]:
    """Cuts the last part off, to evaluate on.

    Args:
        documents: At least one. A single text is cut after a line.
        share: Part to hold out, between 0 and 1.

    Returns:
        Documents to train on and documents to evaluate on, at least one of each.

    Raises:
        ValueError: There is a single document that cannot be cut.
    """
    if len(documents) > 1:
        count = min(max(round(share * len(documents)), 1), len(documents) - 1)
        return documents[:-count], documents[-count:]
    text = documents[0]
    cut = text.find("\n", round(len(text) * (1 - share))) + 1 if isinstance(text, str) else 0
    if cut == 0 or not text[cut:].strip():
        raise ValueError(
            "--data is a single document without a line to cut it after, so that nothing is left "
            "to evaluate on. Give --evaluation-data FILE."
        )
    return [text[:cut]], [text[cut:]]


def _parse(line: str, where: str) -> Document:
    """One line of a .jsonl file."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}). Write one object a line.") from None
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
    match message:
        case {"role": str(role), "content": str(content)} if role in ROLES:
            return Turn(role, content)
    raise ValueError(
        f"{where}: a message is {json.dumps(message)[:80]}. Give each a string "
        f'"content" and a "role" of {", ".join(ROLES)}.'
    )


def _has_text(document: Document) -> bool:
    return bool(document.strip()) if isinstance(document, str) else bool(document)
