"""Rows written as JSONL: whole or not at all, over nothing else."""

import pytest

from laconic.batches import ReasoningExample
from laconic.data.generators.write_jsonl import example_to_row, write_jsonl
from laconic.errors import BusyError, InputError

ROWS = [{"id": f"r{i}", "question": f"Wie viele? {i} – ä"} for i in range(5)]


def test_rows_are_written_one_a_line_as_they_are(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", iter(ROWS), 5)
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"id": "r0", "question": "Wie viele? 0 – ä"}'
    assert len(lines) == 5


def test_an_equal_file_is_kept_and_another_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, iter(ROWS), 5)
    before = path.read_bytes()
    write_jsonl(path, iter(ROWS), 5)
    for other in (ROWS[1:], ROWS[:4], [*ROWS, ROWS[0]]):
        with pytest.raises(BusyError, match="is there and holds other rows; choose another name, or remove it"):
            write_jsonl(path, iter(other), len(other))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_refusal_comes_at_the_first_other_row(tmp_path):
    path, read = tmp_path / "a.jsonl", []
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(BusyError):
        write_jsonl(path, (read.append(row) or row for row in ROWS), 5)
    assert len(read) == 1


def test_too_few_rows_write_nothing(tmp_path):
    with pytest.raises(InputError, match=r"a\.jsonl: 6 rows asked, there are 5; ask for fewer"):
        write_jsonl(tmp_path / "a.jsonl", iter(ROWS), 6)
    assert not list(tmp_path.iterdir())


def test_what_belongs_to_a_file_is_written_with_it_or_neither(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    second.write_text("{}\n", encoding="utf-8")
    with pytest.raises(BusyError):
        write_jsonl(first, iter(ROWS), 5, lambda: write_jsonl(second, iter(ROWS), 5))
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]
    second.unlink()
    write_jsonl(first, iter(ROWS), 5, lambda: write_jsonl(second, iter(ROWS), 5))
    assert first.read_bytes() == second.read_bytes()


def test_an_example_keeps_its_marks():
    example = ReasoningExample("i", "Q?", ("<<1+1=2>>",), "2", {"template": "t"})
    assert example_to_row(example) == {
        "id": "i",
        "question": "Q?",
        "steps": ["<<1+1=2>>"],
        "answer": "2",
        "template": "t",
    }
