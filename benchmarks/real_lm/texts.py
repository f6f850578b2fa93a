"""Text for a language model that comes with every Python, as rows of tokens.

Conversations ask for the docstrings of the standard library's functions. Plain text is the Python
language reference. Both are under the license PSF-2.0.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from examples.llm.data import Document, Encoder, Rows, pack
from examples.tools.docstring_chats import conversations
from examples.tools.document_files import write_documents

Text = Literal["chats", "plain"]


def documents(text: Text) -> list[Document]:
    """Read all documents of a kind, in an order that is always the same."""
    if text == "chats":
        return list(conversations())
    return [topics[name] for name in sorted(topics)]


def file_of(folder: Path, text: Text, count: int) -> Path:
    """Return the file with the first documents of a kind, which is written if it is missing."""
    file = folder / f"{text}-{count}.jsonl"
    if not file.exists():
        write_documents(file, documents(text)[:count])
    return file


def rows(folder: Path, text: Text, *, count: int, context: int) -> Rows:
    """Encode the first rows of a kind of text, `[count, context]`.

    Args:
      folder: checkpoint whose tokenizer and chat template are used.
      text: kind of text.
      count: number of rows.
      context: tokens of a row.

    Raises:
      ValueError: the text is too short.
    """
    packed = pack(Encoder(folder).encode(documents(text), text), context)
    if len(packed.tokens) < count:
        raise ValueError(f"count={count} rows of {context} tokens: {text} has {len(packed.tokens)}")
    return Rows(*(field[:count] for field in packed))
