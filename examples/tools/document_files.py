"""Files of documents that `examples.finetune_llm --data` reads."""

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.llm.data import Document


def write_documents(file: Path, documents: Iterable[Document]) -> None:
    """Write texts and chats, one on a line. The file appears when it is complete."""
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.absolute().parent, prefix=".writing-") as scratch:
        new = Path(scratch) / file.name
        with new.open("w", encoding="utf-8") as lines:
            for document in documents:
                key = "text" if isinstance(document, str) else "messages"
                lines.write(json.dumps({key: document}) + "\n")
        new.replace(file)
