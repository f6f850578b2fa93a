"""Render chats with the Jinja template of a checkpoint.

A template is a program that came with the weights. It runs in jinja2's immutable sandbox, with the
names that Hugging Face's tokenizers define for templates.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.llm.generation_block import GenerationBlock, Part, has_generation, split
from examples.llm.json_files import read_object

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token")

# The date that `strftime_now` formats, to which Llama 3's own templates fall back. With the date of
# the clock, a run that resumes on another day would have other data.
NOW = datetime(2024, 7, 26)

Message = dict[str, str]  # with "role" and "content"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A compiled chat template."""

    file: Path  # named in errors
    template: Template
    tokens: Mapping[str, str]  # texts of special tokens, by names such as "bos_token"
    marks_generation: bool  # True if it has generation blocks

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render a chat.

        Args:
          messages: the chat.
          add_generation_prompt: end the text where an answer of the assistant would begin.

        Returns:
          The text, in which generation blocks are marked.

        Raises:
          ValueError: the template fails, raises an exception of its own, or leaves the sandbox.
        """
        variables = {
            **self.tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            # Templates compare these with none, which an undefined name does not equal.
            "tools": None,
            "documents": None,
        }
        try:
            return self.template.render(variables)
        except Exception as error:  # The sandbox does not limit which errors a template raises.
            raise ValueError(
                f"{self.file} fails for the first {len(messages)} messages: "
                f"{type(error).__name__}: {error}. Change the chat or the template."
            ) from error

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """Render a chat, split into what the assistant says and the rest.

        If the template has generation blocks, exactly their text is learned. Otherwise prefixes of
        the chat are rendered. For each message i of the assistant, the text of `messages[: i + 1]`
        begins with that of `messages[:i]` and a generation prompt. What follows is learned, except
        white space at its end, which comes after the mark that ends a turn.

        The limit: if a template without blocks ignores `add_generation_prompt`, its words before an
        answer, such as the role, are learned too.

        Args:
          messages: the chat.

        Returns:
          The text in parts, none of them empty.

        Raises:
          ValueError: the template fails, or the text of a prefix is not a prefix of the text.
        """
        whole = self.render(messages)
        if self.marks_generation:
            try:
                return split(whole)
            except ValueError as error:
                raise ValueError(f"{self.file} {error}.") from None
        parts, done = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:i], add_generation_prompt=True)
            through = self.render(messages[: i + 1])
            nested = through.startswith(prompt) and whole.startswith(through)
            if not nested or len(prompt) < done:
                raise ValueError(
                    f"{self.file} rewrites earlier text when message {i + 1} of a chat is added, "
                    "so that the assistant's words cannot be told from the rest. Write {% "
                    "generation %} before them and {% endgeneration %} after them in the template."
                )
            end = len(through.rstrip())
            parts += [Part(whole[done : len(prompt)], False), Part(whole[len(prompt) : end], True)]
            done = max(end, len(prompt))
        return [part for part in (*parts, Part(whole[done:], False)) if part.text]


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint.

    Args:
      folder: the checkpoint, with a template in chat_template.jinja or else in
        tokenizer_config.json.

    Returns:
      The template, or None if there is none.

    Raises:
      ValueError: a file is broken, or the template uses a token that is not defined.
    """
    config_file = folder / TOKENIZER_CONFIG
    config = read_object(config_file) if config_file.exists() else {}
    file = folder / JINJA
    if file.exists():
        try:
            source = file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}. Convert it first.") from None
    else:
        file, source = config_file, _template_of(config, config_file)
    return None if source is None else _compile(source, file, config, config_file)


def _template_of(config: Mapping[str, Any], file: Path) -> str | None:
    """Return the default template of a tokenizer_config.json."""
    match config.get("chat_template"):
        case None:
            return None
        case str(source):
            return source
        case [*entries]:
            for entry in entries:
                match entry:
                    case {"name": "default", "template": str(source)}:
                        return source
    raise ValueError(
        f'{file} has "chat_template" {config["chat_template"]!r:.80}. Give a string, or a list of '
        'objects with "name" and "template", of which one has the name "default".'
    )


def _compile(source: str, file: Path, config: Mapping[str, Any], config_file: Path) -> ChatTemplate:
    """Compile a template for the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=NOW.strftime)
    try:
        parsed = environment.parse(source)
        template = environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError) as error:
        line = getattr(error, "lineno", "?")
        raise ValueError(
            f"{file} has a chat template that is not valid Jinja, line {line}: {error}. Correct it."
        ) from None
    for name in meta.find_undeclared_variables(parsed) & {"bos_token", "eos_token"}:
        # Jinja would render nothing instead. A null stands for a model without this token.
        if name not in config:
            raise ValueError(
                f'{file} uses {name}, but {config_file} has no "{name}". Add it there, null if '
                "there is none."
            )
    return ChatTemplate(
        file=file,
        template=template,
        tokens=_tokens(config, config_file),
        marks_generation=has_generation(parsed),
    )


def _tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return the texts of the special tokens that a tokenizer_config.json names."""
    tokens = {}
    for name in SPECIAL_TOKENS:
        match config.get(name):
            case None:
                pass
            case str(text) | {"content": str(text)}:
                tokens[name] = text
            case other:
                raise ValueError(
                    f'{file} has "{name}" {other!r:.80}. Give a string or an object with "content".'
                )
    return tokens


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write a value as JSON, without the HTML escapes of jinja2's own filter.

    It takes no other arguments of `json.dumps`, such as `default`, which is a function that would
    run outside of the sandbox.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    """Reject a chat that a template cannot render."""
    raise TemplateError(message)
