"""Refusals of the fine-tuning example: broken files, and templates that fail or break out."""

import json

import pytest

from examples import finetune_llm
from examples.llm.documents import Turn
from examples.llm.encoding import read_encoder
from examples.llm.options import Options
from tests.support import llm_chat_templates as templates
from tests.support.llm_tokenizers import MARKS, byte_tokenizer

CHAT = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yes."))

# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "content", "words"),
    (
        ("chat_template.jinja", "a\n{% if %}", r"template\.jinja .* not valid Jinja, line 2"),
        ("chat_template.jinja", "{% generation %}", "not valid Jinja, line 1"),
        ("chat_template.jinja", b"\xff", "not UTF-8 text"),
        ("chat_template.jinja", "{{ bos_token }}", r'config\.json has no "bos_token". Add it'),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is broken JSON.*again"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json has a list"),
        ("tokenizer_config.json", '{"chat_template": 3}', 'has "chat_template" 3. Give a string'),
        (
            "tokenizer_config.json",
            '{"chat_template": [{"name": "rag", "template": ""}]}',
            'one has the name "default"',
        ),
        (
            "tokenizer_config.json",
            '{"chat_template": "", "eos_token": 5}',
            r'config.json has "eos_token" 5. Give a string or',
        ),
        ("tokenizer.json", "{", r"tokenizer\.json is not a tokenizer: .*Copy or download"),
        ("tokenizer.json", "{}", r"tokenizer\.json is not a tokenizer: Model missing"),
    ),
)
def test_bad_files_are_named(name, content, words, tmp_path):
    byte_tokenizer(MARKS["llama3"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        read_encoder(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is missing"):
        read_encoder(tmp_path)


# ------------------------------------------------------------------------------------- the sandbox


def refused(folder, source: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^document 2: .*chat_template\.jinja fails .*{words}"):
        list(read_encoder(templates.write(folder, "llama3", source)).encode(["a", CHAT]))


@pytest.mark.parametrize(
    "source",
    (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update(content='other') }}",
        "{% set _ = messages.clear() %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.year }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
    ),
)
def test_templates_neither_leave_the_sandbox_nor_change_a_chat(source, tmp_path):
    refused(tmp_path, source, "SecurityError")


@pytest.mark.parametrize(
    ("source", "words"),
    (
        ("{{ raise_exception('no system turn') }}", "TemplateError: no system turn. Change the"),
        ("{{ nothing.name }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "TypeError"),
        # `json.dumps` would call it outside of the sandbox.
        ("{{ messages | tojson(default=strftime_now) }}", "TypeError: .*'default'"),
        ("{% for i in range(10000000) %}{% endfor %}", "OverflowError"),
    ),
)
def test_a_template_that_fails_is_named_with_the_number_of_the_document(source, words, tmp_path):
    refused(tmp_path, source, words)


# -------------------------------------------------------------------------------------- a whole run


def test_documents_are_counted_through_the_part_that_is_held_out(tmp_path):
    """Errors name the file and the number in it."""
    refuses = "{% if messages[-1].content == 'bad' %}{{ raise_exception('bad') }}{% endif %}"
    templates.write(tmp_path, "llama3", refuses + templates.LLAMA3)

    def lines(*contents):
        asked = {"role": "user", "content": "a"}
        chats = [[asked, {"role": "assistant", "content": content}] for content in contents]
        return "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)

    data, other = tmp_path / "data.jsonl", tmp_path / "other.jsonl"
    data.write_text(lines(*["good"] * 9, "bad"))
    other.write_text(lines("good"))

    def read(data, evaluation_data):
        options = Options(checkpoint=tmp_path, data=data, evaluation_data=evaluation_data)
        return finetune_llm.read_task(options, mesh=None)

    for held_out in (None, other):
        words = r"^--data .*data\.jsonl, document 10: .*chat_template\.jinja fails"
        with pytest.raises(ValueError, match=words):
            read(data, held_out)
    with pytest.raises(ValueError, match=r"^--evaluation-data .*data\.jsonl, document 10: "):
        read(other, data)
