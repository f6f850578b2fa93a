"""A tokenizer that needs no training, and the marks that chats of each family have."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = {
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
        *("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "gemma": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "plain": ("</s>",),
}


def byte_tokenizer(marks) -> Tokenizer:
    """A token for every byte, and for each of the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return tokenizer
