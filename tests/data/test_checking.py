"""Rows looked over: every fault kept, lengths by part, what stands twice, what is over."""

import json

import pytest

from laconic.core.contract import Example
from laconic.data.checking import PARTS, Scan, look, ranked, scan, twice
from laconic.data.tokens import load_tokenizer
from tests.conftest import needs

ROWS = [
    Example("a", "Three and four?", ("<<3+4=7>>", "<<7+1=8>>"), "8"),
    Example("b", "Who?", (), "Ann"),
    Example("c", "three, AND four", ("<<3+4=7>>",), "8"),
]


def quiet(name: str, done: int, total: int) -> None:
    pass


def test_rows_are_counted():
    found = look(Scan(ROWS, ""), None, None, quiet)
    assert (found.rows, found.chainless, found.wordless, found.answer) == (3, 1, 1, ("8", 2 / 3))
    assert found.twice == (("a", "c"),)
    assert (found.lengths, found.over, found.faults) == ({}, (), ())
    assert look(Scan([], ""), None, None, quiet).answer == ("", 0.0)


def test_lengths_are_those_of_the_tokenizer(shared):
    tokenizer = load_tokenizer(shared / "data" / "tokenizers" / "gsm-bpe-2048")  # it names no eos
    found = look(Scan(ROWS, ""), tokenizer, 20, quiet)
    ids = {row.id: [len(tokenizer.encode(text)) for text in (row.question, *row.steps)] for row in ROWS}
    assert list(found.lengths) == list(PARTS)
    assert found.lengths["question"].most == max(n for n, *_ in ids.values())
    assert found.lengths["chain"].most == sum(ids["a"][1:])
    assert found.lengths["chain without its last step"].most == ids["a"][1]
    assert found.lengths["answer with its prompt"].p50 == len(tokenizer.encode("The answer is:")) + 2
    assert found.over == ("a", "c")


@pytest.mark.parametrize(("counts", "expected"), [([5], (5, 5, 5, 5)), (range(1, 101), (50, 90, 99, 100))])
def test_ranks_are_the_nearest(counts, expected):
    assert ranked(list(counts)) == expected


def test_a_question_counts_once_for_each_row_after_the_first():
    assert twice([ROWS[0], ROWS[2], ROWS[0]]) == (("a", "c"),)
    assert twice(ROWS[:2]) == ()


def test_lines_of_icot_and_tables_are_read(tmp_path):
    (tmp_path / "rows.txt").write_text("Three and four?||<<3+4=7>> #### 7\nno row\n", encoding="utf-8")
    found = scan(tmp_path / "rows.txt")
    assert [example.steps for example in found.examples] == [("<<3+4=7>>",)]
    assert [fault.line for fault in found.faults] == [2]
    needs("pyarrow")
    import pyarrow
    from pyarrow.parquet import write_table

    rows = [{"question": "Q?", "steps": ["<<1+1=2>>"], "answer": "2"}, {"question": "R?", "steps": [], "answer": None}]
    write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = scan(tmp_path / "rows.parquet")
    assert len(found.examples) == 1
    assert "rows.parquet:row 2:answer: " in found.faults[0].text


def test_what_is_accepted_is_noted(tmp_path):
    row = json.dumps({"question": "Q?", "steps": [], "answer": "2"})
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n{row}\r\n\n".encode())
    found = scan(tmp_path / "rows.jsonl")
    assert set(found.notes) == {
        "a byte-order mark at its start", "lines end with CR LF (2 lines)", "blank lines at the end",
    }  # fmt: skip
    assert not found.faults
