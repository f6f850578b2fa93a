"""Files of documents appear when they are complete; conversations from the standard library."""

import pytest

from examples.llm.data import read_documents
from examples.tools.docstring_chats import conversations
from examples.tools.document_files import write_documents


def test_a_file_of_documents_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "chats.jsonl"
    documents = ["a text", [{"role": "user", "content": "é"}]]
    write_documents(path, [])
    path.write_text("earlier")

    def interrupted():
        yield documents[0]
        assert path.read_text() == "earlier"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_documents(path, interrupted())
    assert [file.read_text() for file in path.parent.iterdir()] == ["earlier"]
    write_documents(path, documents)
    assert read_documents(path, "--data") == documents


@pytest.mark.slow
def test_conversations_are_answers_to_functions_without_their_docstrings():
    chats = conversations()
    assert len(chats) > 1000
    answers = [chat[1]["content"] for chat in chats]
    assert len(set(answers)) == len(answers)
    for (question, answer), _ in zip(chats, range(200), strict=False):
        assert question["role"] == "user" and answer["role"] == "assistant"
        assert "def " in question["content"]
        assert answer["content"] not in question["content"]
    assert conversations() == chats
