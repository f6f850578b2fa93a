"""Documents as token ids, and which of these there is something to learn from.

Of a text, everything. Of a chat, what the assistant says and that it stops there: the rest is
given to a model, never asked from it. Chats are written in the way that the tokenizer knows:

    Llama 3   <|start_header_id|>user<|end_header_id|>\\n\\nHello<|eot_id|>
    Gemma     <start_of_turn>user\\nHello<end_of_turn>\\n
    others    ### user\\nHello</s>\\n          with the tokenizer's own end of text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from .documents import Document, Turn

BEGINNINGS = ("<|begin_of_text|>", "<bos>", "<s>")
ENDINGS = ("<|end_of_text|>", "<eos>", "</s>", "<|endoftext|>")


class Encoded(NamedTuple):
    """A document.

    Attributes:
        ids: int32 `[tokens]`.
        learned: bool `[tokens]`: tokens that the model learns to predict.
    """

    ids: np.ndarray
    learned: np.ndarray


@dataclass(frozen=True)
class ChatTemplate:
    """How a turn of a chat is written: `open role close content end after`.

    Attributes:
        open: Before the role.
        close: Between role and content.
        end: Says that the turn is over; the last token to learn.
        after: Between turns.
        roles: Roles that have another name here.
        has_system: Whether there is a system turn; otherwise its words begin the user's first.
    """

    open: str
    close: str
    end: str
    after: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    has_system: bool = True


LLAMA3 = ChatTemplate("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>")
GEMMA = ChatTemplate(
    "<start_of_turn>", "\n", "<end_of_turn>", "\n", {"assistant": "model"}, has_system=False
)


class Encoder:
    """Turns documents into tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """Finds out how this tokenizer marks beginnings, ends and turns.

        Raises:
            ValueError: It has no token for the end of a text.
        """
        # What files carry for inference would cut or fill every piece of a document.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.beginning = self._first_known(BEGINNINGS)
        self.ending = self._first_known(ENDINGS)
        if self.ending is None:
            raise ValueError(
                "tokenizer.json has no token for the end of a text. Add one of "
                f"{', '.join(ENDINGS)} as a special token."
            )
        self.template = ChatTemplate("### ", "\n", self.ending, "\n")
        for template in (LLAMA3, GEMMA):
            if self._knows(template.open) and self._knows(template.end):
                self.template = template

    def encode(self, documents: Sequence[Document]) -> Iterator[Encoded]:
        """Encodes documents, one after the other."""
        for document in documents:
            parts = self._text(document) if isinstance(document, str) else self._chat(document)
            ids = [np.asarray(ids, np.int32) for ids, _ in parts]
            learned = [np.full(len(ids), learn) for ids, learn in parts]
            yield Encoded(np.concatenate(ids), np.concatenate(learned))

    def _text(self, text: str) -> list[tuple[list[int], bool]]:
        return [
            (self._marks(self.beginning or ""), False),
            (self._words(text), True),
            (self._marks(self.ending), True),
        ]

    def _chat(self, turns: Sequence[Turn]) -> list[tuple[list[int], bool]]:
        template, parts = self.template, [(self._marks(self.beginning or ""), False)]
        for turn in turns if template.has_system else _without_system(turns):
            role = template.roles.get(turn.role, turn.role)
            learn = turn.role == "assistant"
            parts += [
                (self._marks(f"{template.open}{role}{template.close}"), False),
                (self._words(turn.content.strip()), learn),
                (self._marks(template.end), learn),
                (self._marks(template.after), False),
            ]
        return parts

    def _marks(self, text: str) -> list[int]:
        """Text of a template, in which special tokens are special."""
        self.tokenizer.encode_special_tokens = False
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _words(self, text: str) -> list[int]:
        """Text of a document, in which they are not: nobody ends a turn by writing <|eot_id|>."""
        self.tokenizer.encode_special_tokens = True
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _knows(self, token: str) -> bool:
        return self.tokenizer.token_to_id(token) is not None

    def _first_known(self, tokens: Sequence[str]) -> str | None:
        return next(filter(self._knows, tokens), None)


def _without_system(turns: Sequence[Turn]) -> list[Turn]:
    """The same chat with what the system says in front of the next turn of the user."""
    merged: list[Turn] = []
    said = ""
    for turn in turns:
        if turn.role == "system":
            said += turn.content.strip() + "\n\n"
        elif turn.role == "user":
            merged.append(Turn("user", said + turn.content.strip()))
            said = ""
        else:
            merged.append(turn)
    return [*merged, Turn("user", said.strip())] if said else merged
