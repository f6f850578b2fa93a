"""Text and chats as rows of tokens, with a mark on those that the model learns to predict.

A .jsonl file has a document on each line: {"text": "..."} or {"messages": [{"role": "user",
"content": "..."}, {"role": "assistant", ...}]}. All of a text is learned. Of a chat, written by the
checkpoint's own template, the assistant's answers are learned.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformers import PreTrainedTokenizerFast

from examples.llm.checkpoint import COPY_AGAIN, read_object

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
ROLES = ("system", "user", "assistant")
Document = str | list[dict[str, str]]
# With the date of the clock, a run that resumes on another day would have other data.
_SAME_DATE = "{% macro strftime_now(format) %}26 Jul 2024{% endmacro %}"


def read_documents(path: Path, option: str) -> list[Document]:
    """Read the documents of a file that are not empty.

    Raises:
      ValueError: there is no such file, a line is not a document, or all documents are empty. The
        message names the option.
    """
    if not path.is_file():
        raise ValueError(f"{option} is {path}: there is no such file. Give a .jsonl file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} is {path}: it is not UTF-8 text. Convert it first.") from None
    # `splitlines` would also split at line separators inside JSON strings.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]
    documents = [_parse(line, f"{option} {path}, line {n}") for n, line in lines]
    documents = [each for each in documents if (each.strip() if isinstance(each, str) else each)]
    if not documents:
        raise ValueError(f"{option} is {path}: it has no text. Give a file with text.")
    return documents


def _parse(line: str, where: str) -> Document:
    """Parse one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}). Write one object per line.") from None
    match record:
        case {"text": str(text), **rest} if "messages" not in rest:
            return text
        case {"messages": list(messages), **rest} if "text" not in rest:
            if all(map(_is_message, messages)):
                return messages
    raise ValueError(
        f'{where}: {line[:80]}. Give an object with a string "text", or with a list "messages" of '
        f'objects with a string "content" and a "role" of {", ".join(ROLES)}.'
    )


def _is_message(value: Any) -> bool:
    match value:
        case {"role": str(role), "content": str()}:
            return role in ROLES
    return False


def hold_out(documents: list[Document], option: str) -> tuple[list[Document], list[Document]]:
    """Split off the last tenth of the documents, at least one, to evaluate on.

    Raises:
      ValueError: there is a single document.
    """
    if len(documents) < 2:
        raise ValueError(f"{option} has one document, and nothing to evaluate on. Give several.")
    count = max(round(0.1 * len(documents)), 1)
    return documents[:-count], documents[-count:]


class Encoded(NamedTuple):
    """An encoded document."""

    ids: np.ndarray  # int32 `[tokens]`
    learned: np.ndarray  # bool `[tokens]`: tokens that the model learns to predict


class Encoder:
    """Encoder of documents, with the tokenizer and the chat template of a checkpoint."""

    def __init__(self, folder: Path):
        """Read the files of a checkpoint. None of its code runs: a template is sandboxed.

        Raises:
          ValueError: a file is missing or broken, or there is no token for the end of a text.
        """
        self.folder = folder
        if not (folder / TOKENIZER).is_file():
            raise ValueError(f"{folder} has no {TOKENIZER}. Give a folder that has one.")
        if (folder / TOKENIZER_CONFIG).exists():
            read_object(folder / TOKENIZER_CONFIG)
        try:
            self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # The library raises nothing more specific.
            broken = f"{folder / TOKENIZER} or {TOKENIZER_CONFIG} is broken"
            raise ValueError(f"{broken}: {error}. {COPY_AGAIN}") from None
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f'{folder / TOKENIZER_CONFIG} has no "eos_token". Add it.')
        template = self.tokenizer.chat_template
        self.template = None if template is None else _SAME_DATE + template
        self.marks_answers = bool(re.search(r"{%-?\s*generation\b", template or ""))

    def encode(self, documents: Sequence[Document], name: str, first: int = 1) -> Iterator[Encoded]:
        """Encode documents, one after the other; errors call them by a name and a number.

        Raises:
          ValueError: the checkpoint's template fails for a chat, or it has none.
        """
        for number, document in enumerate(documents, start=first):
            try:
                is_text = isinstance(document, str)
                ids, learned = self._text(document) if is_text else self._chat(document)
            except Exception as problem:  # A template raises what it likes.
                where = "" if isinstance(document, str) else f"the chat template of {self.folder}: "
                raise ValueError(f"{name} {number}: {where}{problem}") from problem
            yield Encoded(np.asarray(ids, np.int32), np.asarray(learned, np.bool_))

    def _text(self, text: str) -> tuple[list[int], list[bool]]:
        # A text that spells the token for its end does not end there.
        body = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        begin = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        ids = [*begin, *body, self.tokenizer.eos_token_id]
        return ids, [False] * len(begin) + [True] * (len(body) + 1)

    def _chat(self, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
        if self.template is None:
            raise ValueError(
                f'there is none. Add chat_template.jinja, or "chat_template" in {TOKENIZER_CONFIG}.'
            )
        special = self.tokenizer.all_special_tokens
        for content in (message["content"] for message in messages):
            if spelled := [token for token in special if token in content]:
                raise ValueError(f"a message spells {spelled}, which would end it. Remove it.")
        if self.marks_answers:
            whole = self._render(messages, return_assistant_tokens_mask=True)
            return whole["input_ids"], [bool(mark) for mark in whole["assistant_masks"]]
        ids = self._render(messages)["input_ids"]
        learned = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:index], add_generation_prompt=True)["input_ids"]
            answered = self._render(messages[: index + 1])["input_ids"]
            if ids[: len(answered)] != answered or answered[: len(prompt)] != prompt:
                raise ValueError(
                    "what is before an answer changes after it, so that the tokens of the answer "
                    "are not known. Mark them with {% generation %} ... {% endgeneration %}."
                )
            learned[len(prompt) : len(answered)] = [True] * (len(answered) - len(prompt))
        return ids, learned

    def _render(self, messages: list[dict[str, str]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, tokenize=True, return_dict=True, **options
        )


class Rows(NamedTuple):
    """Rows of tokens, all `[rows, context]`."""

    tokens: np.ndarray  # int32: inputs of the model
    targets: np.ndarray  # int32: the token after each input, in the same document
    learned: np.ndarray  # bool: targets that count in the loss
    # int32: the document of each token within its row, from 1; 0 is padding. Tokens attend within
    # their segment only.
    segments: np.ndarray
    positions: np.ndarray  # int32: position within the segment, from 0


def pack(documents: Iterator[Encoded], context: int) -> Rows:
    """Pack documents into rows, one after the other, so that only the last row has padding.

    A document that reaches over the end of a row goes on in the next one, as a segment of its own.
    Every token to learn is the target of the one before it, except the first of a document.

    Raises:
      ValueError: there is nothing to learn.
    """
    encoded = list(documents)
    ids, learned = (np.concatenate(field) for field in zip(*encoded, strict=True))
    document = np.repeat(np.arange(len(encoded)), [len(each.ids) for each in encoded])
    within = document[1:] == document[:-1]  # the target is in the document of its input
    learned = learned[1:] & within
    if not learned.any():
        raise ValueError(
            "The data has nothing to learn: every document is shorter than two tokens, or a chat "
            "without an answer of the assistant. Give other --data."
        )

    def rows(field: np.ndarray, dtype: Any = np.int32) -> np.ndarray:
        return np.pad(field, (0, -len(field) % context)).astype(dtype).reshape(-1, context)

    numbers = rows(document[:-1] + 1)
    begins = np.diff(numbers, axis=1, prepend=0) != 0
    at = np.arange(context)
    return Rows(
        tokens=rows(ids[:-1]),
        targets=rows(ids[1:] * within),
        learned=rows(learned, np.bool_),
        segments=np.where(numbers > 0, begins.cumsum(axis=1), 0).astype(np.int32),
        positions=(at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)).astype(np.int32),
    )


def rows_of_step(num_rows: int, *, count: int, seed: int, step: int) -> np.ndarray:
    """Choose the rows of a step, int64 `[count]`: a function of seed and step alone.

    Each epoch takes all rows once, in a random order of its own.
    """
    epochs, places = np.divmod(np.arange(step * count, (step + 1) * count), num_rows)
    orders = {e: np.random.default_rng((seed, e)).permutation(num_rows) for e in set(epochs)}
    return np.array([orders[epoch][at] for epoch, at in zip(epochs, places, strict=True)])


def place(rows: Rows, indices: np.ndarray, mesh: Mesh) -> Rows:
    """Put chosen rows on the devices, split over both axes of the mesh.

    All processes have all rows, and give the same indices.
    """
    sharding = NamedSharding(mesh, P(("data", "fsdp")))

    def on_devices(field: np.ndarray) -> jax.Array:
        shape = (len(indices), field.shape[1])
        # JAX calls this for the devices of this process only.
        return jax.make_array_from_callback(shape, sharding, lambda part: field[indices[part[0]]])

    return Rows(*map(on_devices, rows))
