"""`benchmarks/word_problems.py`: a second reading of the stories gives the same chains; no story is in both files."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import word_problems

FACTORS = {"half": 0.5, "double": 2, "twice": 2, "triple": 3, "three times": 3}
LESS = ("loses", "sells", "to ", "takes", "throws", "steals", "leaves")


def apply_sentence(sentence: str, number: float) -> float:
    for word, factor in FACTORS.items():
        if word in sentence.lower():
            return number * factor
    operand = int(re.findall(r"\d", sentence)[0])
    return number - operand if any(word in sentence for word in LESS) else number + operand


def read_rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_step(step: str, before: float, after: float) -> bool:
    """Whether `step` is `<after>`, or an equation that begins with `before` and is right."""
    if step.startswith("<"):
        return step == f"<{after:.0f}>"
    match = re.fullmatch(r"(\d)([+*/-])(\d)=(\d);", step)
    assert match, step
    left, operator, right, result = match.groups()
    operate = {"+": float.__add__, "-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}[operator]
    return float(left) == before and operate(float(left), float(right)) == float(result) == after


@pytest.mark.parametrize("chain_style", ["results", "equations"])
def test_word_problems_have_right_chains_and_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chain_style: str
) -> None:
    out = tmp_path / "words.jsonl"
    arguments = ["word_problems.py", "--rows", "300", "--results-only-fraction", "0.5", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*arguments, "--chain-style", chain_style])
    word_problems.main()
    assert "300 rows" in capsys.readouterr().out
    train, held_out = read_rows(out), read_rows(tmp_path / "words.held_out.jsonl")
    assert (len(train), len(held_out)) == (300, 1000)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    num_short = 0
    for row in [*train, *held_out]:
        question, steps = str(row["question"]), row["steps"]
        assert isinstance(steps, list)
        num_short += question.endswith("=:")
        *sentences, _ = re.findall(r"[A-Z][^.?]*[.?]", question)
        starts = [sentence for sentence in sentences if re.search(r" has \d", sentence)]
        number = float(re.findall(r"\d", starts[-1])[0])
        for sentence, step in zip(sentences[len(starts) :], steps, strict=True):
            before, number = number, apply_sentence(sentence, number)
            assert step == f"{number:.0f}" if question.endswith("=:") else is_step(step, before, number), question
            assert question.endswith("=:") or ("<" in step) == (chain_style == "results")
        assert row["answer"] == f"{number:.0f}"
    assert 100 < num_short < 200
