"""The data of the fine-tuning example: documents, their tokens, packed rows, batches."""

import json
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from examples.llm.batches import place, rows_of_step
from examples.llm.documents import Turn, hold_out, read_documents
from examples.llm.encoding import Encoded, Encoder, read_encoder
from examples.llm.packing import Rows, pack
from tests.support import llm_chat_templates as templates
from tests.support.llm_tokenizers import MARKS, byte_tokenizer

CHAT = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yes."))


# ---------------------------------------------------------------------------------------- documents


def test_what_a_tokenizer_does_for_inference_is_not_done_to_pieces(tmp_path):
    encoder = read_encoder(templates.write(tmp_path, "llama3"))
    tokenizer = byte_tokenizer(MARKS["llama3"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    other = Encoder(tokenizer, tmp_path, encoder.template)
    ours, theirs = (list(e.encode(["a b" * 9, CHAT])) for e in (encoder, other))
    assert [list(document.ids) for document in theirs] == [list(document.ids) for document in ours]


def test_all_of_a_text_is_learned_but_its_beginning():
    encoder = Encoder(byte_tokenizer(MARKS["llama3"]), pathlib.Path(), None)
    (document,) = encoder.encode(["a<|eot_id|>b"])
    words = [encoder.special.tokenizer.decode([i], False) for i in document.ids.tolist()]
    assert words == ["<|begin_of_text|>", *"a<|eot_id|>b", "<|end_of_text|>"]
    assert document.learned.tolist() == [False] + [True] * 13


def test_a_tokenizer_without_an_end_of_text_is_refused():
    with pytest.raises(ValueError, match=r"no token for the end.*</s>"):
        Encoder(byte_tokenizer(()), pathlib.Path(), None)


def test_files_are_read(tmp_path):
    chat = {"messages": [turn._asdict() for turn in CHAT], "source": "made up"}
    lines = [json.dumps({"text": "one\u2028two"}, ensure_ascii=False), "", json.dumps(chat)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": " "}']) + "\n")
    assert read_documents(tmp_path / "a.jsonl", "--data") == ["one\u2028two", CHAT]
    (tmp_path / "a.txt").write_text("one\ntwo")
    assert read_documents(tmp_path / "a.txt", "--data") == ["one\ntwo"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    (
        ("a.jsonl", b'{"text": "a"}\n{"text": 1}', r"--data .*a.jsonl, line 2: \['text'\]"),
        ("a.jsonl", b'{"text": "a", "messages": []}', r"line 1: .*Give exactly one"),
        ("a.jsonl", b"[1]", "line 1: list instead of an object"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b'{"messages": [{"role": "tool", "content": ""}]}', "system, user, assistant"),
        ("a.txt", b" \n", "it has no text"),
        ("a.txt", b"\xff\xfe", "UTF-8"),
    ),
)
def test_bad_files_are_refused(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_documents(tmp_path / name, "--data")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--data is .*none: there is no such file"):
        read_documents(tmp_path / "none", "--data")


@given(st.lists(st.text("a\n", min_size=1), min_size=2), st.floats(0.01, 0.99))
def test_held_out_documents_are_the_last_ones(documents, share):
    train, held_out = hold_out(documents, share)
    assert train and held_out and train + held_out == documents


def test_a_single_text_is_cut_after_a_line():
    assert hold_out(["a\n" * 10 + "b"], 0.2) == (["a\n" * 9], ["a\nb"])
    with pytest.raises(ValueError, match="--evaluation-data"):
        hold_out(["a b"], 0.5)
    with pytest.raises(ValueError, match="--evaluation-data"):
        hold_out([CHAT], 0.5)


# ------------------------------------------------------------------------------------------ packing


@st.composite
def corpora(draw):
    """Documents whose tokens are all different, so that each can be followed into its row."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    masks = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    if not any(any(mask[1:]) for mask in masks):
        lengths, masks = [*lengths, 2], [*masks, [False, True]]
    ends = np.cumsum(lengths)
    return [
        Encoded(np.arange(end - n, end, dtype=np.int32), np.array(mask))
        for n, end, mask in zip(lengths, ends, masks, strict=True)
    ]


@given(corpora(), st.integers(1, 16))
def test_every_token_to_learn_is_a_target_once_after_the_one_before_it(documents, context):
    rows = pack(documents, context)
    assert rows.tokens.shape[1] == context
    learned = [d.ids[1:][d.learned[1:]] for d in documents]
    np.testing.assert_array_equal(np.sort(rows.targets[rows.learned]), np.concatenate(learned))
    real = rows.segments > 0
    # All tokens differ and each document counts up: targets follow, and no row mixes documents.
    np.testing.assert_array_equal(rows.targets[real], rows.tokens[real] + 1)
    assert not rows.learned[~real].any()


@given(corpora(), st.integers(1, 16))
def test_positions_start_anew_with_each_segment_and_segments_are_consecutive(documents, context):
    rows = pack(documents, context)
    for segments, positions, tokens in zip(rows.segments, rows.positions, rows.tokens, strict=True):
        length = np.count_nonzero(segments)
        assert (segments[:length] > 0).all() and np.isin(np.diff(segments[:length]), (0, 1)).all()
        for segment in range(1, segments.max(initial=0) + 1):
            here = segments == segment
            np.testing.assert_array_equal(positions[here], np.arange(here.sum()))
            np.testing.assert_array_equal(np.diff(tokens[here]), 1)


def test_rows_are_packed_tightly_and_pieces_with_nothing_to_learn_left_out():
    def document(length, learn=True):
        return Encoded(np.arange(length, dtype=np.int32), np.full(length, learn))

    lengths = (4, 7, 5, 6, 3, 8)  # Of what is read, one token less: 3 + 6, 4 + 5, 2 + 7.
    rows = pack([document(n) for n in lengths] + [document(50, learn=False)], 9)
    assert len(rows.tokens) == 3 and (rows.segments > 0).all()
    with pytest.raises(ValueError, match="nothing to learn"):
        pack([document(50, learn=False), document(1)], 9)


@given(st.integers(1, 30), st.integers(1, 40))
def test_rows_are_thinned_out_evenly(num_rows, count):
    places = np.arange(num_rows)[:, None]
    chosen = Rows(*[places] * 5).evenly(count).tokens[:, 0]
    assert len(chosen) == min(num_rows, count) and chosen[0] == 0
    gaps = np.diff([*chosen, num_rows])
    assert gaps.min() > 0 and gaps.max() - gaps.min() <= 1


# ------------------------------------------------------------------------------------------ batches


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5), st.integers(0, 20))
def test_rows_of_a_step_depend_on_seed_and_step_alone(num_rows, count, seed, step):
    def draw(seed, step):
        return rows_of_step(num_rows, count=count, seed=seed, step=step)

    first = draw(seed, step)
    draw(seed + 1, step + 3)  # What is asked in between changes nothing.
    np.testing.assert_array_equal(draw(seed, step), first)
    # All rows come before any comes again.
    stream = np.concatenate([draw(seed, s) for s in range(2 * num_rows)])[: 2 * num_rows]
    for epoch in np.split(stream, 2):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [
        tuple(rows_of_step(50, count=50, seed=seed, step=step))
        for seed in range(2)
        for step in range(2)
    ]
    assert len(set(orders)) == 4


def test_rows_are_split_over_both_axes_of_the_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = Rows(*(np.arange(60).reshape(20, 3).astype(f.dtype) for f in Rows.empty(1, 1)))
    indices = np.arange(8, 0, -1).reshape(2, 4)
    placed = place(rows, indices, mesh)
    np.testing.assert_array_equal(placed.tokens, rows.tokens[indices])
    shards = {tuple(np.asarray(s.data)[:, 0, 0] // 3) for s in placed.tokens.addressable_shards}
    assert shards == {(8, 4), (7, 3), (6, 2), (5, 1)}
