"""Documents encoded as token ids, with a mark on those that the model learns to predict.

All of a text is learned. Of a chat, the assistant's answers and the marks that end them are
learned. Chats are rendered with the checkpoint's own template.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from examples.llm.chat_template import JINJA, TOKENIZER_CONFIG, ChatTemplate, read_chat_template
from examples.llm.documents import Document, Turn
from examples.llm.generation_block import CLOSE, OPEN
from examples.llm.json_files import COPY_AGAIN
from examples.llm.special_tokens import SpecialTokens

TOKENIZER = "tokenizer.json"
BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>")
ENDINGS = ("<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>")


class Encoded(NamedTuple):
    """An encoded document."""

    ids: np.ndarray  # int32 `[tokens]`
    learned: np.ndarray  # bool `[tokens]`: tokens that the model learns to predict


class Encoder:
    """Encoder of documents, with the tokenizer and the chat template of a checkpoint."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, template: ChatTemplate | None):
        """Find the tokens that begin and end a text.

        Args:
          tokenizer: tokenizer of the checkpoint.
          folder: the checkpoint, for errors.
          template: its chat template; None if it has none, which texts do not need.

        Raises:
          ValueError: the tokenizer has no token for the end of a text.
        """
        self.special = SpecialTokens.of(tokenizer, marks=(OPEN, CLOSE))
        self.folder = folder
        self.template = template
        self.beginning = _first_known(tokenizer, BEGINNINGS)
        self.ending = _first_known(tokenizer, ENDINGS)
        if not self.ending:
            raise ValueError(
                f"{folder / TOKENIZER} has no token for the end of a text. Add one of "
                f"{', '.join(ENDINGS)} as a special token."
            )

    def encode(
        self, documents: Sequence[Document], name: str = "document", first: int = 1
    ) -> Iterator[Encoded]:
        """Encode documents, one after the other.

        Args:
          documents: texts and chats.
          name: name of a document in errors, before its number.
          first: number of the first document.

        Yields:
          The encoded documents.

        Raises:
          ValueError: the checkpoint's template fails for a chat, or it has none.
        """
        for number, document in enumerate(documents, start=first):
            try:
                is_text = isinstance(document, str)
                parts = self._text(document) if is_text else self._chat(document)
            except ValueError as problem:
                raise ValueError(f"{name} {number}: {problem}") from problem
            ids = [np.asarray(ids, np.int32) for ids, _ in parts]
            learned = [np.full(len(ids), learn) for ids, learn in parts]
            yield Encoded(np.concatenate(ids), np.concatenate(learned))

    def _text(self, text: str) -> list[tuple[list[int], bool]]:
        return [
            (self.beginning, False),
            (self.special.encode_plain(text), True),
            (self.ending, True),
        ]

    def _chat(self, turns: Sequence[Turn]) -> list[tuple[list[int], bool]]:
        if self.template is None:
            raise ValueError(
                f"{self.folder} has no chat template, which this chat needs. "
                f'Add {JINJA} to it, or "chat_template" to its {TOKENIZER_CONFIG}, or give '
                'documents as {"text": ...}.'
            )
        contents, letters = self.special.hide([turn.content for turn in turns])
        parts = self.template.parts(
            [
                {"role": turn.role, "content": content}
                for turn, content in zip(turns, contents, strict=True)
            ]
        )
        encoded: list[tuple[list[int], bool]] = [([], False)]  # A template may render nothing.
        before = ""
        for part in parts:
            encoded.append((self._encode_after(before, part.text, letters), part.learned))
            before = part.text
        return encoded

    def _encode_after(self, before: str, text: str, letters: dict[int, str]) -> list[int]:
        """Encode text as the continuation of the text before it.

        By itself, it would start with a space with some tokenizers. No token spans its start, since
        a model that answers is given whole tokens.
        """
        head = self.special.encode(before, letters)
        both = self.special.encode(before + text, letters)
        if both[: len(head)] == head:
            return both[len(head) :]
        return self.special.encode(text, letters)


def read_encoder(folder: Path) -> Encoder:
    """Read the tokenizer and the chat template of a checkpoint.

    Args:
      folder: the checkpoint.

    Returns:
      The encoder of its documents.

    Raises:
      FileNotFoundError: there is no tokenizer.json.
      ValueError: a file is broken, or the tokenizer has no token for the end of a text.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing. {COPY_AGAIN}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises nothing more specific.
        raise ValueError(f"{file} is not a tokenizer: {error}. {COPY_AGAIN}") from None
    return Encoder(tokenizer, folder, read_chat_template(folder))


def _first_known(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """Return a list of the id of the first token that a tokenizer has, empty if it has none."""
    ids = [tokenizer.token_to_id(token) for token in tokens]
    return [token for token in ids if token is not None][:1]
