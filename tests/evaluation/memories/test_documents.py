"""Documents and their probes: needles, copied passages, questions, and invalid rows."""

import json
from pathlib import Path

import pytest

from laconic import load_tokenizer
from laconic.errors import InputError
from laconic.evaluation.memories.documents import NEEDLES, load_probed_documents
from tests.conftest import REPO

STORY = "Once upon a time there was a little girl. She had a red ball. One day the ball was lost in the park. "


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"book": name, "text": STORY * 20}) + "\n" for name in ("a", "a", "b")))
    return path


def test_load_probed_documents_inserts_needles_and_copies_passages(documents: Path) -> None:
    tokenizer = load_tokenizer("stories260k")
    loaded = load_probed_documents(tokenizer, str(documents), None, 192, None)[0]
    assert [document.name for document in loaded] == ["a", "b"], "rows of one book are one text"
    for document in loaded:
        assert len(document.ids) == 192
        text = tokenizer.decode(document.ids)
        needles, passages = document.probes["needles"], document.probes["passages"]
        answers = [tokenizer.decode(probe.ids[-probe.num_scored :]).strip() for probe in needles]
        assert len(answers) == len(NEEDLES)
        assert all(f" {answer}." in text for answer in answers)
        assert all(tokenizer.decode(probe.ids[-probe.num_scored :]) in text for probe in passages)
        (continuation,) = document.probes["continuation"]
        assert continuation.num_scored == len(continuation.ids) - 1 == 63
    assert loaded == load_probed_documents(tokenizer, str(documents), None, 192, None)[0]


def test_load_probed_documents_questions_with_their_context(tmp_path: Path) -> None:
    rows = [
        {"context": STORY * 20, "question": "What color was the ball?", "answer_prefix": "It was", "answer": "red"},
        {"context": STORY * 20, "question": "Where was it lost?", "answer": "in the park", "max_new_tokens": 9},
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer("stories260k")
    loaded = load_probed_documents(tokenizer, None, str(tmp_path / "questions.jsonl"), 192, None)
    (document,) = loaded[0]
    assert (document.name, loaded[1]) == ("text 1", ())
    texts = [tokenizer.decode(probe.ids) for probe in document.probes["questions"]]
    assert texts[0].strip() == "Question: What color was the ball?\nAnswer: It was red"
    assert texts[1].strip() == "Question: Where was it lost?\nAnswer: in the park"


def test_load_probed_documents_refuses(documents: Path, tmp_path: Path) -> None:
    tokenizer, questions = load_tokenizer("stories260k"), tmp_path / "questions.jsonl"
    questions.write_text('{"document": "c", "question": "Who?", "answer": "she"}\n')
    with pytest.raises(InputError, match="document c: there is no such document; there are a, b"):
        load_probed_documents(tokenizer, str(documents), str(questions), 192, None)
    questions.write_text('{"document": "a", "question": "Who?"}\n')
    with pytest.raises(InputError, match="answer"):
        load_probed_documents(tokenizer, str(documents), str(questions), 192, None)
    with pytest.raises(InputError, match=r"cut to 90 tokens .* too short: .* a larger --tokens"):
        load_probed_documents(tokenizer, str(documents), None, 90, None)


def test_load_probed_documents_skips_short_texts(documents: Path, tmp_path: Path) -> None:
    tokenizer, questions = load_tokenizer("stories260k"), tmp_path / "questions.jsonl"
    documents.write_text(json.dumps({"book": "short", "text": STORY}) + "\n" + documents.read_text())
    rows = [{"document": name, "question": "Who?", "answer": "Captain Nemo"} for name in ("short", "a")]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_probed_documents(tokenizer, str(documents), str(questions), 192, 1)
    assert [document.name for document in loaded[0]] == ["a"], "the limit counts documents that are used"
    assert [note.split()[:3] for note in loaded[1]] == [["skipped", "1", "document"], ["left", "out", "1"]]


def test_load_probed_documents_counts_questions_of_short_texts(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [{"context": f"{n} {STORY}", "question": "Who?", "answer": x} for n, x in enumerate(("red", "Captain Nemo"))]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_probed_documents(load_tokenizer("stories260k"), None, str(questions), 192, None)
    assert [document.name for document in loaded[0]] == ["text 1"]
    assert [note.split()[:3] for note in loaded[1]] == [["questions", "alone:", "needles,"], ["left", "out", "1"]]


def test_book_questions_are_about_their_books() -> None:
    rows = [json.loads(line) for line in (REPO / "examples/book_questions.jsonl").read_text().splitlines()]
    assert len(rows) >= 20
    assert all(row.keys() == {"document", "question", "answer_prefix", "answer"} for row in rows)
