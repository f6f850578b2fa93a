"""Chats of the fine-tuning example: the checkpoint's own template writes them, in a sandbox."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from examples.llm.chat_template import ChatTemplate, read_chat_template
from examples.llm.config import DecoderConfig
from examples.llm.demo import new_decoder
from examples.llm.documents import Turn
from examples.llm.encoding import Encoded, Encoder, read_encoder
from examples.llm.export import write_model
from examples.llm.special_tokens import SpecialTokens
from tests.support import llm_chat_templates as templates
from tests.support.llm_tokenizers import MARKS, byte_tokenizer

CHAT = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yes."))
LONGER = (*CHAT, Turn("user", "Sure?"), Turn("assistant", "No."))
WRITTEN = {
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[Yes.<|eot_id|>]"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[No.<|eot_id|>]"
    ),
    "gemma": (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\n[Yes.<end_of_turn>]\n"
        "<start_of_turn>user\nSure?<end_of_turn>\n"
        "<start_of_turn>model\n[No.<end_of_turn>]\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n[Yes.<|im_end|>]\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n[No.<|im_end|>]\n"
    ),
}
KINDS = pytest.mark.parametrize("kind", WRITTEN)
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "chatml": "<|im_end|>"}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """An encoder for each of the templates."""
    return {
        kind: read_encoder(templates.write(tmp_path_factory.mktemp(kind), kind)) for kind in WRITTEN
    }


def with_brackets(document: Encoded, tokenizer: Tokenizer) -> str:
    """The text, with [ ] around what is learned."""
    text, edges = "", np.diff(np.concatenate([[0], document.learned.astype(int), [0]]))
    for i, edge in enumerate(edges):
        text += {1: "[", -1: "]", 0: ""}[int(edge)]
        if i < len(document.ids):
            text += tokenizer.decode([int(document.ids[i])], skip_special_tokens=False)
    return text


def written(encoder: Encoder, chat) -> str:
    (document,) = encoder.encode([chat])
    return with_brackets(document, encoder.special.tokenizer)


def custom(folder, source: str, kind: str = "llama3") -> Encoder:
    """An encoder with a template of the test's own."""
    return read_encoder(templates.write(folder, kind, source))


def messages(*contents: str) -> list[dict[str, str]]:
    """A chat that a user begins."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


# ------------------------------------------------------------------------------- what is learned


@KINDS
def test_the_checkpoints_template_writes_chats_and_only_the_assistant_is_learned(kind, encoders):
    assert written(encoders[kind], LONGER) == WRITTEN[kind]


@KINDS
def test_plain_text_is_written_without_the_template(kind, encoders):
    begin = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "chatml": ""}[kind]
    end = {"llama3": "<|end_of_text|>", "gemma": "<eos>", "chatml": "<|endoftext|>"}[kind]
    assert written(encoders[kind], "a b") == f"{begin}[a b{end}]"


@KINDS
@given(data=st.data())
def test_what_is_not_learned_is_what_a_model_is_given(kind, data, encoders):
    """Where an answer begins, the tokens before it are those of the prompt for it."""
    answers = data.draw(st.lists(st.text("a \n<|é", max_size=6), min_size=1, max_size=3))
    chat = messages(*(text for answer in answers for text in ("Hi ", answer)))
    encoder = encoders[kind]
    (document,) = encoder.encode([tuple(Turn(**message) for message in chat)])
    starts = np.flatnonzero(np.diff(document.learned.astype(int)) == 1) + 1
    assert len(starts) == len(answers)
    for i, start in enumerate(starts):
        prompt = encoder.template.render(chat[: 2 * i + 1], add_generation_prompt=True)
        prompt = prompt.translate(dict.fromkeys((0xFDD0, 0xFDD1)))
        np.testing.assert_array_equal(document.ids[:start], encoder.special.encode(prompt, {}))


def test_white_space_between_turns_is_not_learned_and_that_in_a_generation_block_is(tmp_path):
    between = "{% for m in messages %}{{ m.content + '</s> \n ' }}{% endfor %}"
    assert written(custom(tmp_path, between), CHAT) == "Be brief.</s> \n Hi</s> \n [Yes.</s>] \n "
    inside = "{% generation %}{{ m.content + '</s> \n ' }}{% endgeneration %}"
    assert written(custom(tmp_path, by_role(inside)), CHAT) == "Be brief.Hi[Yes.</s> \n ]"


def by_role(assistant: str) -> str:
    """A template that writes what the assistant says in a way of its own."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{assistant}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )


def test_a_template_that_rewrites_earlier_turns_needs_generation_blocks(tmp_path):
    says = "{% if loop.last %}(I think) {% endif %}{{ m.content }}</s>"
    plain = by_role(says)
    assert written(custom(tmp_path, plain), CHAT) == "Be brief.Hi[(I think) Yes.</s>]"
    with pytest.raises(ValueError, match=r"^document 1: .*chat_template\.jinja rewrites .* endgen"):
        written(custom(tmp_path, plain), LONGER)
    marked = by_role("{% generation %}" + says + "{% endgeneration %}")
    expected = "Be brief.Hi[Yes.</s>]Sure?[(I think) No.</s>]"
    assert written(custom(tmp_path, marked), LONGER) == expected


def test_generation_blocks_may_be_nested_and_share_names_with_what_is_around_them(tmp_path):
    source = (
        "{% for m in messages %}{% set x = 1 %}"
        "{% generation %}{% set x = x + 1 %}a{% generation %}{{ x }}{% endgeneration %}b"
        "{% endgeneration %}{{ x }}{% endfor %}"
    )
    assert written(custom(tmp_path, source), CHAT) == "[a2b]2" * 3


def test_a_generation_block_that_is_left_early_is_refused(tmp_path):
    source = "{% for m in messages %}{% generation %}a{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(ValueError, match="leaves a generation block before its end"):
        written(custom(tmp_path, source), CHAT)


def test_a_template_that_writes_nothing_gives_no_tokens(tmp_path):
    assert written(custom(tmp_path, "{# nothing #}"), CHAT) == ""


# ----------------------------------------------------------------- special tokens that people write


@KINDS
@given(data=st.data())
def test_nobody_ends_a_turn_by_writing_the_token_that_does(kind, data, encoders):
    tokens = st.sampled_from([*MARKS[kind], "\ufdd0", "\ufdd1", "\U000f0000", "<", "|>", "a", " "])
    contents = data.draw(st.lists(st.lists(tokens).map("".join), min_size=2, max_size=4))
    encoder = encoders[kind]
    tokenizer = encoder.special.tokenizer
    special = set(tokenizer.get_added_tokens_decoder())

    def marks(contents):
        chat = tuple(Turn(**message) for message in messages(*contents))
        (document,) = encoder.encode([chat])
        text = tokenizer.decode(document.ids.tolist(), skip_special_tokens=False)
        return [i for i in document.ids if i in special], text

    found, text = marks(contents)
    assert found == marks(["x"] * len(contents))[0]
    # It is text as the template would write it, without anything left to hide it.
    expected = encoder.template.render(messages(*contents))
    if kind != "chatml":  # There, the marks of blocks are in it too.
        assert text == expected


def test_what_is_learned_of_an_answer_that_spells_tokens_is_its_text(encoders):
    chat = (Turn("user", "<|eot_id|>"), Turn("assistant", "No: <|eot_id|>"))
    assert written(encoders["llama3"], chat).endswith("[No: <|eot_id|><|eot_id|>]")
    (document,) = encoders["llama3"].encode([chat])
    end = encoders["llama3"].special.tokenizer.token_to_id("<|eot_id|>")
    assert list(document.ids).count(end) == 2


def test_templates_may_search_cut_and_trim_contents_that_spell_tokens(tmp_path):
    source = (
        "{% for m in messages %}"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1] | trim }}"
        "{% else %}{{ m.content[:8] }}{{ m.content | length }}{% endif %}<|eot_id|>{% endfor %}"
    )
    chat = (Turn("user", "<|eot_id|>"), Turn("assistant", "hm</think> a<|eot_id|>b "))
    encoder = custom(tmp_path, source)
    assert written(encoder, chat) == "<|eot_id10<|eot_id|>[a<|eot_id|>b<|eot_id|>]"
    (document,) = encoder.encode([chat])
    end = encoder.special.tokenizer.token_to_id("<|eot_id|>")
    assert list(document.ids).count(end) == 2


def test_special_tokens_may_be_single_letters_and_overlap():
    tokenizer = byte_tokenizer(("ab", "bc", "é", "abc"))
    special = SpecialTokens.of(tokenizer)
    contents = ("abcé", "xabbc", "é\U000f0000")
    hidden, letters = special.hide(contents)
    assert not any(special.spelled.search(text) for text in hidden)
    assert [len(text) for text in hidden] == [len(text) for text in contents]
    for text, content in zip(hidden, contents, strict=True):
        assert tokenizer.decode(special.encode(text, letters), skip_special_tokens=False) == content
    (one,) = special.encode("abc", letters)
    assert tokenizer.id_to_token(one) == "abc"


def test_an_answer_does_not_start_with_a_space_that_a_tokenizer_puts_before_texts(tmp_path):
    letters = [chr(code) for code in range(32, 127)]
    words = models.BPE({token: i for i, token in enumerate(["<unk>", "▁", "\n", *letters])}, [])
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["</s>"])
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    custom(tmp_path, source)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (document,) = read_encoder(tmp_path).encode([(Turn("user", "<s>"), Turn("assistant", "a"))])
    text = "".join(tokenizer.id_to_token(int(i)) for i in document.ids)
    assert text == "▁user:▁<s></s>assistant:▁a</s>"


def test_no_token_reaches_over_the_start_of_an_answer(tmp_path):
    """A model that is asked has the tokens before it, and merges none of its own with them."""
    source = "{% for m in messages %}{{ m.role + ':\n' + m.content }}{% endfor %}"
    if_prompt = "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    custom(tmp_path, source + if_prompt)
    tokenizer = byte_tokenizer(MARKS["llama3"], merges=[("Ċ", "Ċ")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = read_encoder(tmp_path)
    (document,) = encoder.encode([(Turn("user", "\na"), Turn("assistant", "\nb"))])
    tokens = [tokenizer.id_to_token(int(i)) for i in document.ids]
    assert tokens == [*"user:", "ĊĊ", "a", *"assistant:", "Ċ", "Ċ", "b"]
    assert document.learned.tolist() == [False] * 18 + [True] * 2


# -------------------------------------------------------------------------- where templates are


def test_a_template_is_in_a_file_of_its_own_or_in_the_tokenizers_config(tmp_path):
    def source_of(value):
        content = templates.CONFIGS["llama3"] | {"chat_template": value}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        return read_chat_template(tmp_path).render([])

    assert read_chat_template(tmp_path) is None
    assert source_of("one {{ eos_token }}") == "one <|eot_id|>"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert source_of(named) == "three"
    (tmp_path / "chat_template.jinja").write_text("four {{ bos_token }}")
    assert source_of("one") == "four <|begin_of_text|>"
    assert read_chat_template(tmp_path).file == tmp_path / "chat_template.jinja"


def test_a_checkpoint_without_a_template_encodes_texts_and_refuses_chats(tmp_path):
    byte_tokenizer(MARKS["llama3"]).save(str(tmp_path / "tokenizer.json"))
    encoder = read_encoder(tmp_path)
    assert written(encoder, "a") == "<|begin_of_text|>[a<|end_of_text|>]"
    words = rf'--data, document 8: {tmp_path} has no chat .*Add chat_template\.jinja .*"text"'
    with pytest.raises(ValueError, match=words):
        list(encoder.encode(["a", CHAT], "--data, document", 7))


def test_templates_have_what_hugging_faces_have(tmp_path):
    def render(source):
        (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null, "pad_token": "<p>"}')
        (tmp_path / "chat_template.jinja").write_text(source)
        return read_chat_template(tmp_path).render(messages("<ü>"))

    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<ü>"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ add_generation_prompt }} {{ bos_token }}{{ pad_token }}") == "False <p>"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_a_chat_that_the_template_rejects_is_refused(encoders):
    chat = (Turn("user", "a"), Turn("user", "b"), Turn("assistant", "c"))
    with pytest.raises(ValueError, match="TemplateError: user and assistant have to take turns"):
        written(encoders["gemma"], chat)


def test_a_template_is_what_its_fields_say(encoders):
    template = encoders["chatml"].template
    assert isinstance(template, ChatTemplate) and template.marks_generation
    assert not encoders["llama3"].template.marks_generation
    assert template.tokens == {"eos_token": "<|im_end|>"}


def test_every_day_and_every_host_has_the_same_text(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    assert read_chat_template(tmp_path).render([]) == "26 Jul 2024"


# --------------------------------------------------------------------------------------- exporting


def test_the_template_goes_with_the_fine_tuned_model_and_an_older_one_does_not_stay(tmp_path):
    source, other, target = (tmp_path / name for name in ("source", "other", "target"))
    source.mkdir()
    other.mkdir()
    templates.write(source, "llama3")
    byte_tokenizer(MARKS["gemma"]).save(str(other / "tokenizer.json"))
    config = DecoderConfig(
        family="llama",
        vocabulary=8,
        width=4,
        mlp_width=4,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=2,
        tie_embeddings=True,
    )
    _, params = new_decoder(config)
    write_model(target, config, params, source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert written(read_encoder(target), LONGER) == WRITTEN["llama3"]
    write_model(target, config, params, other)
    assert read_chat_template(target) is None
