"""Tokenizers that need no training, and the marks that chats of each family have."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = {
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
}


def byte_tokenizer(marks, *, merges=()) -> Tokenizer:
    """A token for every byte, for each of the marks, and for pairs that are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*alphabet, *map("".join, merges)]
    model = models.BPE({token: i for i, token in enumerate(vocabulary)}, list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer
