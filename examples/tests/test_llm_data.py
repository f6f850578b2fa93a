"""Data of `examples/llm`: documents, chats through their template, and rows of tokens."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.llm.data import Encoded, Encoder, hold_out, pack, place, read_documents, rows_of_step
from examples.tests.support import llm_files
from examples.tests.support.llm_files import BEGIN, END, MARKED, UNMARKED, write_tokenizer

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And"},
    {"role": "assistant", "content": "No."},
]


def encoded(folder, document) -> tuple[str, str]:
    """The text of a document as it is read, and what of it is learned."""
    encoder = Encoder(folder)
    ((ids, learned),) = encoder.encode([document], "document")
    assert ids.dtype == np.int32 and learned.dtype == np.bool_
    return encoder.tokenizer.decode(ids), encoder.tokenizer.decode(ids[learned])


# ---------------------------------------------------------------------------------------- encoding


@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_of_a_chat_the_answers_and_their_ends_are_learned(template, tmp_path):
    write_tokenizer(tmp_path, template)
    text, learned = encoded(tmp_path, CHAT)
    assert text.startswith(f"{BEGIN}<|start_header|>user<|end_header|>Hi{END}<|start_header|>assis")
    assert learned == f"Yes.{END}No.{END}"


def test_all_of_a_text_is_learned_but_its_beginning(tmp_path):
    write_tokenizer(tmp_path, template=None)
    assert encoded(tmp_path, "A loss.") == (f"{BEGIN}A loss.{END}", f"A loss.{END}")


def test_a_text_that_spells_the_end_does_not_end_there(tmp_path):
    write_tokenizer(tmp_path)
    encoder = Encoder(tmp_path)
    ((ids, _),) = encoder.encode([f"a{END}b"], "document")
    assert list(ids).count(encoder.tokenizer.eos_token_id) == 1
    assert encoder.tokenizer.decode(ids) == f"{BEGIN}a{END}b{END}"


def test_a_template_that_rewrites_earlier_turns_has_to_mark_answers(tmp_path):
    first = "{{ messages[0].content if messages | length < 3 else '' }}"
    write_tokenizer(tmp_path, first + UNMARKED)
    with pytest.raises(ValueError, match=r"document 1: .*what is before an answer changes"):
        encoded(tmp_path, CHAT)
    write_tokenizer(tmp_path, first + MARKED)
    assert encoded(tmp_path, CHAT)[1] == f"Yes.{END}No.{END}"


def test_every_day_has_the_same_text(tmp_path):
    write_tokenizer(tmp_path, "{{ strftime_now('%d %b %Y') }}" + UNMARKED)
    assert encoded(tmp_path, CHAT)[0].startswith("26 Jul 2024")


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "source",
    (
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update(content='other') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__ }}",
    ),
)
@pytest.mark.parametrize("template", [MARKED, UNMARKED])
def test_templates_neither_leave_the_sandbox_nor_change_a_chat(source, template, tmp_path):
    write_tokenizer(tmp_path, source + template)
    with pytest.raises(ValueError, match=r"^document 1: the chat template of .*unsafe"):
        encoded(tmp_path, CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    (
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{{ nothing.name }}", "'nothing' is undefined"),
        ("{% if %}", "Expected an expression"),
        (None, "there is none. Add chat_template.jinja"),
    ),
)
def test_a_template_that_fails_is_named_with_the_number_of_the_document(template, words, tmp_path):
    write_tokenizer(tmp_path, template)
    with pytest.raises(ValueError, match=rf"^document 2: the chat template of .*: .*{words}"):
        list(Encoder(tmp_path).encode(["a", CHAT], "document"))


def test_nobody_ends_a_turn_by_writing_the_token_that_does(tmp_path):
    write_tokenizer(tmp_path)
    chat = [{"role": "user", "content": f"Hi{END}"}, *CHAT[1:]]
    with pytest.raises(ValueError, match=r"a message spells \['<\|end\|>'\], which would end it"):
        encoded(tmp_path, chat)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    (
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is broken JSON.*again"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json has a list"),
        ("tokenizer_config.json", "{}", r'tokenizer_config\.json has no "eos_token". Add it'),
        ("tokenizer.json", "{", r"tokenizer\.json or .* is broken: .*Copy or download"),
        ("tokenizer.json", "{}", r"tokenizer\.json or .* is broken: "),
        ("tokenizer.json", None, r"has no tokenizer\.json"),
    ),
)
def test_bad_files_of_a_tokenizer_are_named(name, content, words, tmp_path):
    write_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=words):
        Encoder(tmp_path)


# --------------------------------------------------------------------------------------- documents


def test_documents_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [{"text": "a\u2028b"}, {"text": " "}, {"messages": CHAT}]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    assert read_documents(path, "--data") == ["a\u2028b", CHAT]


@pytest.mark.parametrize(
    ("content", "words"),
    (
        (b"\xff", "not UTF-8 text"),
        (b"", "has no text"),
        (b'{"text": "a"}\n{', "line 2: not JSON"),
        (b'{"text": 3}', r"line 1: .*Give an object"),
        (b'{"text": "a", "messages": []}', r"line 1: .*Give an object"),
        (b'{"messages": [{"role": "user"}]}', r"line 1: .*Give an object"),
        (b'{"messages": [{"role": "robot", "content": ""}]}', 'a "role" of system, user'),
        (b"[1]", r"line 1: \[1\]\. Give an object"),
    ),
)
def test_bad_documents_are_refused(content, words, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"(?s)^--data .*data\.jsonl.*{words}"):
        read_documents(path, "--data")
    with pytest.raises(ValueError, match="there is no such file"):
        read_documents(tmp_path / "none.jsonl", "--data")


def test_the_last_tenth_is_held_out():
    letters = list("abcdefghijklmnopqrst")
    assert hold_out(letters, "--data") == (letters[:18], ["s", "t"])
    assert hold_out(["a", "b"], "--data") == (["a"], ["b"])
    with pytest.raises(ValueError, match="--data has one document"):
        hold_out(["a"], "--data")


# -------------------------------------------------------------------------------------------- rows

DOCUMENTS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6
).filter(lambda documents: any(any(learned[1:]) for learned in documents))


@given(DOCUMENTS, st.integers(1, 8))
def test_every_token_to_learn_is_a_target_once_after_the_one_before_it(documents, context):
    """Tokens are numbered through all documents."""
    ends = np.cumsum([len(learned) for learned in documents])
    ids = np.split(np.arange(1, ends[-1] + 1, dtype=np.int32), ends[:-1])
    made = map(Encoded, ids, map(np.array, documents))
    rows = pack(made, context)
    learned = np.concatenate([[False, *learned[1:]] for learned in documents])
    targets = rows.targets[rows.learned]
    np.testing.assert_array_equal(np.sort(targets), 1 + np.flatnonzero(learned))
    np.testing.assert_array_equal(targets, rows.tokens[rows.learned] + 1)
    # Positions go on inside a segment and start at 0 in each; segments are those of documents.
    document = np.concatenate([[0], np.repeat(np.arange(len(ids)), [len(i) for i in ids])])
    for tokens, segments, positions in zip(rows.tokens, rows.segments, rows.positions, strict=True):
        used = tokens > 0
        assert (segments[used] > 0).all() and not segments[~used].any()
        begins = np.diff(segments[used], prepend=0)
        assert begins[0] == 1 and set(begins) <= {0, 1}
        same = np.diff(document[tokens[used]]) == 0
        np.testing.assert_array_equal(begins[1:] == 0, same)
        np.testing.assert_array_equal(positions[used] == 0, begins == 1)
        assert (np.diff(positions[used])[same] == 1).all()


def test_data_with_nothing_to_learn_is_refused():
    with pytest.raises(ValueError, match="nothing to learn"):
        pack(iter([Encoded(np.arange(3, dtype=np.int32), np.zeros(3, bool))]), 4)


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 3), st.integers(0, 9))
def test_rows_of_a_step_depend_on_seed_and_step_alone_and_epochs_take_all(
    num_rows, count, seed, step
):
    one, again = (rows_of_step(num_rows, count=count, seed=seed, step=step) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    epoch = np.concatenate(
        [rows_of_step(num_rows, count=num_rows, seed=seed, step=epoch) for epoch in range(2)]
    ).reshape(2, -1)
    assert (np.sort(epoch) == np.arange(num_rows)).all()
    if num_rows > 12:
        assert (epoch[0] != epoch[1]).any()


def test_rows_are_split_over_both_axes_of_the_mesh():
    rows = pack(iter([Encoded(np.arange(66, dtype=np.int32), np.ones(66, bool))]), 8)
    placed = place(rows, np.array([3, 1, 2, 0]), llm_files.mesh_of(2, 2))
    np.testing.assert_array_equal(placed.tokens, rows.tokens[[3, 1, 2, 0]])
    assert {shard.data.shape for shard in placed.tokens.addressable_shards} == {(1, 8)}
    assert isinstance(placed.learned, jax.Array)
