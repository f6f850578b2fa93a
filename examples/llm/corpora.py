"""The text: two corpora that come with every Python, a tokenizer and batches of tokens.

Pre-training reads the source code of the standard library, fine-tuning the Python language
reference that `help()` shows. Neither needs a download.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCABULARY = 2048
SOURCE_CODE_CHARACTERS = 4_000_000
TOKENIZER_CHARACTERS = 1_000_000
HOLD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpora:
    """Three texts as token ids, each an int32 vector.

    Attributes:
        source_code: The standard library, for pre-training.
        reference: The language reference, for fine-tuning.
        held_out: Topics of the language reference that training never sees.
        tokenizer: What turned the text into ids, to decode them again.
    """

    source_code: np.ndarray
    reference: np.ndarray
    held_out: np.ndarray
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        """Number of distinct token ids."""
        return self.tokenizer.get_vocab_size()


def load_corpora() -> Corpora:
    """Reads both corpora and trains a tokenizer on a sample of each.

    The result depends on the Python version alone.
    """
    source_code = _standard_library()
    reference, held_out = _language_reference()
    tokenizer = _train_tokenizer([*_sample(source_code), *_sample(reference)])
    return Corpora(
        source_code=_encode(tokenizer, source_code),
        reference=_encode(tokenizer, reference),
        held_out=_encode(tokenizer, held_out),
        tokenizer=tokenizer,
    )


def random_windows(
    tokens: np.ndarray, *, count: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Draws the batch of one training step.

    The draw depends on its arguments alone, so that two runs see the same batches without
    sharing any state.

    Args:
        tokens: A corpus, int32 `[length]`.
        count: How many windows to draw.
        context: How many tokens the model reads.
        seed: Seed of the run.
        step: Step within the run.

    Returns:
        int32 `[count, context + 1]`: the one token more is the last one to predict.
    """
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - context, size=count)
    return tokens[starts[:, None] + np.arange(context + 1)]


def all_windows(tokens: np.ndarray, *, context: int, multiple_of: int) -> np.ndarray:
    """Cuts a corpus into windows, for evaluation.

    Args:
        tokens: A corpus, int32 `[length]`.
        context: How many tokens the model reads.
        multiple_of: The number of windows is rounded down to a multiple of this, because
            every worker has to take the same share.

    Returns:
        int32 `[windows, context + 1]`.
    """
    count = len(tokens) // (context + 1)
    count -= count % multiple_of
    if count == 0:
        longest = len(tokens) // multiple_of - 1
        raise ValueError(
            f"--context is {context}: the held-out text has {len(tokens):,} tokens, "
            f"which {multiple_of} workers share, so give at most {longest}."
        )
    return tokens[: count * (context + 1)].reshape(count, context + 1)


def _standard_library() -> list[str]:
    """The top-level modules in alphabetical order, up to a total size."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not files:
        raise FileNotFoundError(
            "This Python ships its standard library without source code; "
            "run the example with one that has it, such as any from python.org."
        )
    texts, size = [], 0
    for file in files:
        texts.append(file.read_text(encoding="utf-8", errors="replace"))
        size += len(texts[-1])
        if size > SOURCE_CODE_CHARACTERS:
            break
    return texts


def _language_reference() -> tuple[list[str], list[str]]:
    """The topics to train on and the topics held out."""
    names = sorted(topics)
    held_out = [topics[name] for name in names[::HOLD_OUT_EVERY]]
    # Topics quote one another at length. Without dropping what the held-out ones share with
    # the others, the evaluation would reward memory.
    seen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    train = []
    for index, name in enumerate(names):
        if index % HOLD_OUT_EVERY:
            paragraphs = topics[name].split("\n\n")
            train.append("\n\n".join(p for p in paragraphs if p not in seen))
    return train, held_out


def _sample(texts: list[str]) -> Iterable[str]:
    """Evenly spaced texts that amount to roughly `TOKENIZER_CHARACTERS`."""
    stride = 1 + sum(map(len, texts)) // TOKENIZER_CHARACTERS
    return texts[::stride]


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One int32 vector of all texts, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*e.ids, end], dtype=np.int32) for e in encodings])
