"""Encoding of special tokens as such in templates, and as plain text in messages.

A message that spells <|eot_id|> must not end a turn. Before a chat is rendered, each special token
that a content spells is replaced by stand-ins: one private character for each of its letters.
Contents keep their length and all other characters, so that templates can trim, cut, join and
search them. When the rendered text is encoded, the stand-ins become the letters again, as plain
text.

The limits: a template can still spell a token if it joins contents that each have a part of it, or
changes the case of <|EOT_ID|>. It does not find a special token that it searches for in a content.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from tokenizers import Tokenizer

PRIVATE = range(0xF0000, 0xFFFFE)  # plane 15 of Unicode, for private use


class Hidden(NamedTuple):
    """Contents that spell no special token."""

    contents: tuple[str, ...]
    letters: dict[int, str]  # the letter of each stand-in, as `str.translate` takes it


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Encoder of text in which special tokens are special, or are not."""

    tokenizer: Tokenizer
    spelled: re.Pattern[str]  # any special token, or another text that is hidden in contents

    @classmethod
    def of(cls, tokenizer: Tokenizer, marks: Iterable[str] = ()) -> Self:
        """Find the special tokens of a tokenizer.

        Args:
          tokenizer: the tokenizer. Its truncation and padding are turned off, which would cut or
            fill every piece of a document.
          marks: other texts to hide in contents.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder().values()
        texts = {token.content for token in added if token.special} | set(marks)
        # The longest first, since tokenizers match the longer of two that begin alike.
        longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        never = "(?!)"
        spelled = re.compile("|".join(map(re.escape, longest_first)) or never)
        return cls(tokenizer=tokenizer, spelled=spelled)

    def hide(self, contents: Sequence[str]) -> Hidden:
        """Replace special tokens in contents by stand-ins."""
        found = "".join(match for text in contents for match in self.spelled.findall(text))
        taken = set().union(*contents)
        free = (code for code in PRIVATE if chr(code) not in taken)
        stand_ins = {letter: next(free) for letter in sorted(set(found))}
        to_stand_ins = str.maketrans(stand_ins)

        def hide(match: re.Match[str]) -> str:
            return match[0].translate(to_stand_ins)

        hidden = tuple(self.spelled.sub(hide, text) for text in contents)
        return Hidden(hidden, {code: letter for letter, code in stand_ins.items()})

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which special tokens are plain text."""
        return self._encode(text, special=False)

    def encode(self, text: str, letters: dict[int, str]) -> list[int]:
        """Encode text in which special tokens are special, unless they consist of stand-ins.

        Args:
          text: rendered text.
          letters: letters of the stand-ins, as `hide` returns them.
        """
        if not any(chr(code) in text for code in letters):
            return self._encode(text, special=True)
        ids: list[int] = []
        start = 0
        for match in self.spelled.finditer(text):
            ids += self.encode_plain(text[start : match.start()].translate(letters))
            ids += self._encode(match[0], special=True)
            start = match.end()
        return ids + self.encode_plain(text[start:].translate(letters))

    def _encode(self, text: str, *, special: bool) -> list[int]:
        self.tokenizer.encode_special_tokens = not special
        return self.tokenizer.encode(text, add_special_tokens=False).ids
