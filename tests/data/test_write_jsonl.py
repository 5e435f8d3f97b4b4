"""JSONL files are written atomically and never overwrite others."""

import pytest

from laconic.batches import ReasoningExample
from laconic.data.generators.write_jsonl import example_to_row, write_jsonl
from laconic.errors import BusyError, InputError

ROWS = [{"id": f"r{i}", "question": f"Wie viele? {i} – ä"} for i in range(5)]


def test_write_jsonl(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", iter(ROWS), 5)
    lines = (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[0] == '{"id": "r0", "question": "Wie viele? 0 – ä"}'
    assert len(lines) == 5


def test_write_jsonl_keeps_equal_files_and_refuses_others(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, iter(ROWS), 5)
    before = path.read_bytes()
    write_jsonl(path, iter(ROWS), 5)
    for other in (ROWS[1:], ROWS[:4], [*ROWS, ROWS[0]]):
        with pytest.raises(BusyError, match="exists and has other rows"):
            write_jsonl(path, iter(other), len(other))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_write_jsonl_stops_at_the_first_other_row(tmp_path):
    path, read = tmp_path / "a.jsonl", []
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(BusyError):
        write_jsonl(path, (read.append(row) or row for row in ROWS), 5)
    assert len(read) == 1


def test_write_jsonl_writes_nothing_for_too_few_rows(tmp_path):
    with pytest.raises(InputError, match=r"a\.jsonl: only 5 of 6 rows"):
        write_jsonl(tmp_path / "a.jsonl", iter(ROWS), 6)
    assert not list(tmp_path.iterdir())


def test_write_jsonl_before_commit(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    second.write_text("{}\n", encoding="utf-8")
    with pytest.raises(BusyError):
        write_jsonl(first, iter(ROWS), 5, lambda: write_jsonl(second, iter(ROWS), 5))
    assert [p.name for p in tmp_path.iterdir()] == ["b.jsonl"]
    second.unlink()
    write_jsonl(first, iter(ROWS), 5, lambda: write_jsonl(second, iter(ROWS), 5))
    assert first.read_bytes() == second.read_bytes()


def test_example_to_row_keeps_metadata():
    example = ReasoningExample("i", "Q?", ("<<1+1=2>>",), "2", {"template": "t"})
    assert example_to_row(example) == {
        "id": "i",
        "question": "Q?",
        "steps": ["<<1+1=2>>"],
        "answer": "2",
        "template": "t",
    }
