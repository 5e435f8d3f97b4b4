"""`benchmarks/small_questions.py`: chains of results and equations from variants of GSM8K."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import small_questions

ROWS = [
    {"id": "a", "question": "A ?", "steps": ["<<3+4=7>>", "<<7-6=1>>", "<<1*5=5>>"], "answer": "5"},
    {"id": "b", "question": "B ?", "steps": ["<<9-8=1>>"], "answer": "1"},
    {"id": "c", "question": "C ?", "steps": ["<<1/2=0.5>>", "<<0.5*8=4>>"], "answer": "4"},
    {"id": "d", "question": "D ?", "steps": ["<<2*4=8>>", "<<8/4=2.0>>"], "answer": "2"},
]
STORY = {"id": "s", "question": "S ? =", "steps": ["<1>", "<2>"], "answer": "2"}


def rewrite(folder: Path, monkeypatch: pytest.MonkeyPatch, style: str, *stories: str) -> dict[str, tuple[str, ...]]:
    """Run the script; return question and steps by id."""
    source, out = folder / "rows.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 20))
    monkeypatch.setattr(sys, "argv", ["small_questions", style, str(source), "--out", str(out), *stories])
    small_questions.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["answer"] for row in rows} <= {row["answer"] for row in (*ROWS, STORY)}
    return {f"{row['id']}{row['question'][3:]}": (row["question"], *row["steps"]) for row in rows}


def test_small_questions_have_the_first_two_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stories.jsonl").write_text(json.dumps(STORY) + "\n" + json.dumps({**STORY, "id": "t"}) + "\n")
    assert rewrite(tmp_path, monkeypatch, "two", "--stories", str(tmp_path / "stories.jsonl"), "0", "1") == {
        "a =": ("A ? =", "<7>", "<1>"),
        "d =": ("D ? =", "<8>", "<2>"),
        "s =": ("S ? =", "<1>", "<2>"),
    }


def test_small_questions_mix_three_kinds_of_chains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rewrite(tmp_path, monkeypatch, "mixed")
    assert {name[0] for name in rows} == {"a", "b", "d"}, "0.5 is no whole number"
    assert rows["a ="] == ("A ? =", "<7>", "<1>", "<5>")
    assert rows["a =:"] == ("A ? =:", "7", "1", "5")
    assert rows["d =="] == ("D ? ==", "2*4=8;", "8/4=2.0;")
