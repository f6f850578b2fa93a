"""Text that comes with every Python, a tokenizer for it, and windows of tokens.

Pre-training reads the source code of the standard library. Fine-tuning reads the Python language
reference, which `help()` shows. Neither needs a download.
"""

import dataclasses
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer

from examples.tools.small_decoder import END_OF_TEXT, standard_library, train_tokenizer

HOLD_OUT_EVERY = 10  # topics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpora:
    """Three texts as token ids, each an int32 vector."""

    source_code: np.ndarray  # the standard library, for pre-training
    reference: np.ndarray  # the language reference, for fine-tuning
    held_out: np.ndarray  # topics of the language reference that are not in `reference`
    tokenizer: Tokenizer

    @property
    def vocabulary(self) -> int:
        """Number of distinct token ids."""
        return self.tokenizer.get_vocab_size()


def load_corpora() -> Corpora:
    """Read the texts and train a tokenizer on a sample of both kinds.

    The result depends on the Python version alone.
    """
    source_code = standard_library()
    reference, held_out = _language_reference()
    tokenizer = train_tokenizer(source_code, reference)
    return Corpora(
        source_code=_encode(tokenizer, source_code),
        reference=_encode(tokenizer, reference),
        held_out=_encode(tokenizer, held_out),
        tokenizer=tokenizer,
    )


def random_windows(
    tokens: np.ndarray, *, count: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Draw the batch of a training step.

    The draw depends on the arguments alone, so that two runs see the same batches without shared
    state.

    Args:
      tokens: corpus, int32 `[length]`.
      count: number of windows.
      context: tokens that the model reads.
      seed: seed of the run.
      step: step within the run.

    Returns:
      int32 `[count, context + 1]`. The additional token is the last target.
    """
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - context, size=count)
    return tokens[starts[:, None] + np.arange(context + 1)]


def worker_windows(
    tokens: np.ndarray, *, workers: int, batch: int, context: int, seed: int, step: int
) -> np.ndarray:
    """Draw the batches of all workers in a training step; see `random_windows`.

    Returns:
      int32 `[workers, batch, context + 1]`.
    """
    count = workers * batch
    windows = random_windows(tokens, count=count, context=context, seed=seed, step=step)
    return windows.reshape(workers, batch, context + 1)


def all_windows(tokens: np.ndarray, *, context: int, multiple_of: int = 1) -> np.ndarray:
    """Cut a corpus into windows, for evaluation.

    Args:
      tokens: corpus, int32 `[length]`.
      context: tokens that the model reads.
      multiple_of: the number of windows is rounded down to a multiple of this, so that all workers
        take the same share.

    Returns:
      int32 `[windows, context + 1]`.

    Raises:
      ValueError: the corpus is too short.
    """
    count = len(tokens) // (context + 1)
    count -= count % multiple_of
    if count == 0:
        longest = len(tokens) // multiple_of - 1
        raise ValueError(
            f"--context is {context}, but the held-out text has {len(tokens):,} tokens for "
            f"{multiple_of} workers. Give at most {longest}."
        )
    return tokens[: count * (context + 1)].reshape(count, context + 1)


def _language_reference() -> tuple[list[str], list[str]]:
    """Return the topics to train on and the topics held out."""
    names = sorted(topics)
    held_out = [topics[name] for name in names[::HOLD_OUT_EVERY]]
    # Topics quote one another at length. If the others kept the paragraphs of the held-out ones,
    # the evaluation would reward memorization.
    seen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    train = []
    for index, name in enumerate(names):
        if index % HOLD_OUT_EVERY:
            paragraphs = topics[name].split("\n\n")
            train.append("\n\n".join(p for p in paragraphs if p not in seen))
    return train, held_out


def _encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode texts as one int32 vector. The end-of-text token follows each of them."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*e.ids, end], dtype=np.int32) for e in encodings])
