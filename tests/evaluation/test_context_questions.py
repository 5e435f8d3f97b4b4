"""Files of questions about contexts in JSONL and Parquet."""

import json
from pathlib import Path
from typing import Any

import pytest

from laconic.errors import InputError
from laconic.evaluation.context_questions import ContextQuestion, load_questions
from tests.conftest import needs

ROWS: list[dict[str, Any]] = [
    {"context": "Lucy is ill.", "question": "Who?", "answer_prefix": "It is", "answer": ["Lucy", "Miss Lucy"],
     "max_new_tokens": 8, "task": "qa_1"},
    {"context": "Tom runs.", "question": "Who?", "answer_prefix": "", "answer": ["Tom"], "max_new_tokens": 4,
     "task": "qa_1"},
    {"context": "Lucy is ill.", "question": "How?", "answer_prefix": "", "answer": ["ill"], "max_new_tokens": 4,
     "task": "qa_2"},
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_load_questions_from_jsonl_and_parquet(tmp_path: Path) -> None:
    needs("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    result = load_questions(write(tmp_path / "a.jsonl", ROWS))
    assert result[0] == ContextQuestion("Lucy is ill.", "Who?", ("Lucy", "Miss Lucy"), "It is", 8)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load_questions(tmp_path / "a.parquet") == result


def test_load_questions_with_one_answer_or_a_document(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"context": "c", "question": "q", "answer": "a", "max_new_tokens": 1, "more": [1], "document": "title"},
        {"document": "book", "question": "q", "answer": "a"},
    ]
    assert load_questions(write(tmp_path / "a.jsonl", rows)) == [
        ContextQuestion("c", "q", ("a",), max_new_tokens=1),
        ContextQuestion("book", "q", ("a",), is_document_name=True),
    ]


@pytest.mark.parametrize("field", ["context", "answer"])
def test_load_questions_names_a_missing_field(tmp_path: Path, field: str) -> None:
    row = {name: value for name, value in ROWS[0].items() if name != field}
    with pytest.raises(InputError, match=f"a.jsonl:1: no field {field}: .*; a row has context"):
        load_questions(write(tmp_path / "a.jsonl", [row]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, "context: not a string"),
        ({"question": ""}, "question: "),
        ({"answer_prefix": 3}, "answer_prefix: expected a string"),
        ({"answer": ["a", 3]}, "answer: expected a list of strings"),
        ({"answer": 5}, "answer: not a string"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer"),
        ({"max_new_tokens": True}, "max_new_tokens: expected an integer"),
    ],
)
def test_load_questions_rejects_invalid_rows(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        load_questions(write(tmp_path / "a.jsonl", [ROWS[0] | change]))
    assert str(error.value).startswith(f"a.jsonl:1: {message}")
