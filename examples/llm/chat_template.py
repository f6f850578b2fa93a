"""Render chats with the Jinja template of the checkpoint.

A template is a program from elsewhere. It runs in jinja2's immutable sandbox, with the names that
Hugging Face's tokenizers define for templates.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from examples.llm.generation_block import GenerationBlock, Part, has_generation, split
from examples.llm.json_files import read_object

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"

# The time that `strftime_now` formats. With that of the clock, a run that goes on tomorrow would
# have other data, and so would hosts around midnight. Templates of Llama 3 fall back to this day.
NOW = datetime(2024, 7, 26)

Message = dict[str, str]  # "role" and "content"


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's template, ready to render chats."""

    file: Path  # where it is from, for errors
    template: Template
    tokens: Mapping[str, str]  # names such as "bos_token" with the text of the token
    marks_generation: bool  # whether it has generation blocks

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render a chat with the checkpoint's template.

        Args:
          messages: the chat.
          add_generation_prompt: end where an answer of the assistant would begin.

        Returns:
          The text, in which generation blocks are marked.

        Raises:
          ValueError: the template fails, raises an exception of its own, or does what the sandbox
            forbids.
        """
        variables = {
            **self.tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            # Templates compare these with none, which an undefined name is not.
            "tools": None,
            "documents": None,
        }
        try:
            return self.template.render(variables)
        except Exception as error:  # Any: the sandbox limits what a template does, not its errors.
            raise ValueError(
                f"{self.file} fails for the first {len(messages)} messages: "
                f"{type(error).__name__}: {error}. Change the chat or the template."
            ) from error

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """Render a chat and find what the assistant says in it.

        The text in generation blocks is learned, to the letter. Without blocks, prefixes of the
        chat are compared, for every message i of the assistant: the text of `messages[: i + 1]`
        goes on where that of `messages[:i]` with a generation prompt ends. White space at its end
        is not learned, as it comes after the mark that ends a turn.

        The limit: if a template ignores `add_generation_prompt`, its words before an answer, such
        as the role, are learned too. Generation blocks help there as well.

        Args:
          messages: the chat.

        Returns:
          The rendered text in parts, none of them empty.

        Raises:
          ValueError: the template fails, or an earlier text is not how the whole one begins.
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
                    "so that what the assistant says cannot be told from the rest. Write {% "
                    "generation %} before it and {% endgeneration %} behind it in the template."
                )
            end = len(through.rstrip())
            parts += [Part(whole[done : len(prompt)], False), Part(whole[len(prompt) : end], True)]
            done = max(end, len(prompt))
        return [part for part in (*parts, Part(whole[done:], False)) if part.text]


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint folder.

    Args:
      folder: the checkpoint, with a template in chat_template.jinja or else in
        tokenizer_config.json.

    Returns:
      The template, or None if there is none.

    Raises:
      ValueError: one of the files is broken, or the template uses a token that is not named.
    """
    config_file = folder / TOKENIZER_CONFIG
    config = read_object(config_file) if config_file.exists() else {}
    file = folder / JINJA
    if file.exists():
        try:
            source = file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no text in UTF-8: {error}. Convert it first.") from None
    else:
        file, source = config_file, _template_of(config, config_file)
    return None if source is None else _compile(source, file, config, config_file)


def _template_of(config: Mapping[str, Any], file: Path) -> str | None:
    """Find the default template in the content of a tokenizer_config.json."""
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
            f"{file} has a chat template that is no Jinja, line {line} of it: {error}. Correct it."
        ) from None
    for name in meta.find_undeclared_variables(parsed) & {"bos_token", "eos_token"}:
        # Jinja would write nothing in its place. A null stands for a model without one.
        if name not in config:
            raise ValueError(
                f'{file} writes {name}, but {config_file} has no "{name}". Add it there, null if '
                "there is none."
            )
    return ChatTemplate(file, template, _tokens(config, config_file), has_generation(parsed))


def _tokens(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Read the texts of the special tokens that tokenizer_config.json names."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token"):
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
    """Write a value as JSON, without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    """Refuse a chat, as templates do that cannot render it."""
    raise TemplateError(message)
