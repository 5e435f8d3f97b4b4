"""Audit of data files: problems, token lengths, duplicates, rows over the limit."""

import json
from pathlib import Path

import pytest

from laconic.batches import ReasoningExample
from laconic.data.audit import (
    HISTORY_NOTE,
    PART_NAMES,
    audit_examples,
    compute_quantiles,
    find_duplicates,
    scan_file,
)
from laconic.data.reasoning.read_examples import ExamplesFile
from laconic.data.tokenizer import load_tokenizer
from tests.conftest import RunCli, needs

ROWS = [
    ReasoningExample("a", "Three and four?", ("<<3+4=7>>", "<<7+1=8>>"), "8"),
    ReasoningExample("b", "Who?", (), "137 euros"),
    ReasoningExample("c", "three, AND four", ("<<3+4=7>>",), "8"),
    ReasoningExample("d", "Why?", (), "Ann"),
]


def quiet(name: str, done: int, total: int) -> None:
    pass


def test_audit_examples_counts():
    result = audit_examples(ExamplesFile(tuple(ROWS), "", ()), None, None, quiet)
    assert (result.rows, result.rows_without_chain) == (3, 1)
    assert result.majority_answer == {"answer": "8", "share": 2 / 3}
    assert result.duplicates == [("a", "c")]
    assert (result.tokens, result.too_long, result.unclear_answers) == ({}, [], ["b"])
    assert [problem["message"] for problem in result.problems] == [
        "row d: answer 'Ann' has no number; give one, or set data.answer_type = \"text\""
    ]
    texts = audit_examples(ExamplesFile(tuple(ROWS[3:]), "", ()), None, None, quiet)
    assert (texts.rows, texts.problems, texts.unclear_answers, texts.answer_type) == (1, [], [], "text")
    assert audit_examples(ExamplesFile((), "", ()), None, None, quiet).majority_answer["share"] == 0


def test_audit_examples_token_lengths(shared):
    tokenizer = load_tokenizer(shared / "data" / "tokenizers" / "gsm-bpe-2048")  # it names no eos
    result = audit_examples(ExamplesFile(tuple(ROWS), "", ()), tokenizer, 20, quiet)
    ids = {row.id: [len(tokenizer.encode(text)) for text in (row.question, *row.steps)] for row in ROWS}
    assert list(result.tokens) == list(PART_NAMES)
    assert result.tokens["question"]["maximum"] == max(n for n, *_ in ids.values())
    assert result.tokens["chain"]["maximum"] == sum(ids["a"][1:])
    assert result.tokens["chain without its last step"]["maximum"] == ids["a"][1]
    assert result.tokens["answer with its prompt"]["p50"] == len(tokenizer.encode("The answer is:")) + 2
    assert result.too_long == ["a", "c"]


@pytest.mark.parametrize(("counts", "expected"), [([5], (5, 5, 5, 5)), (range(1, 101), (50, 90, 99, 100))])
def test_compute_quantiles_by_nearest_rank(counts, expected):
    assert tuple(compute_quantiles(list(counts)).values()) == expected


def test_find_duplicates():
    assert find_duplicates([ROWS[0], ROWS[2], ROWS[0]]) == [("a", "c")]
    assert find_duplicates(ROWS[:2]) == []


def test_scan_file_reads_icot_and_parquet(tmp_path):
    (tmp_path / "rows.txt").write_text("Three and four?||<<3+4=7>> #### 7\nno row\n", encoding="utf-8")
    result = scan_file(tmp_path / "rows.txt")
    assert [example.steps for example in result.examples] == [("<<3+4=7>>",)]
    assert [fault.line for fault in result.problems] == [2]
    needs("pyarrow")
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [{"question": "Q?", "steps": ["<<1+1=2>>"], "answer": "2"}, {"question": "R?", "steps": [], "answer": None}]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    result = scan_file(tmp_path / "rows.parquet")
    assert len(result.examples) == 1
    assert (result.problems[0].line, result.problems[0].message[:8]) == (2, "answer: ")


def test_data_check_refuses_folders(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library `datasets` would search them for minutes; `owner/name` may be a local copy, which it reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "a/b/c", "gsm8k"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("rows", "rows/", "./rows", "./", "a/b/c", str(tmp_path), "/tmp", "/tmp:train"):
        code, _, error = run_cli("data", "check", name)
        assert (code, error.count("\n")) == (66, 1)
        assert "give a file that ends in" in error
        assert "is a folder" in error
    error = run_cli("data", "check", "gsm8k", "--data-dir", str(tmp_path))[2]
    assert "gsm8k:train: no file" in error, "a known data set, whatever is called like it"


def test_audit_notes_conversations_of_several_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
    for conversations, notes in ((turns, []), (turns * 2, [HISTORY_NOTE])):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"conversations": conversations}) + "\n")
        assert audit_examples(scan_file(tmp_path / "rows.jsonl"), None, None, quiet).notes == notes
