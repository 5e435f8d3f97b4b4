"""Questions evaluated: answers matched, figures of a result, records stored."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning.answer_matching import DIGIT, extract_last_digit
from laconic.evaluation.reasoning.evaluate import match_answers
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.evaluation.results_store import EvalItem, EvalJob, EvalMetadata, run_resumable

EXAMPLES = [ReasoningExample(f"q{i}", f"{i} + 1 =", (), str((i + 1) % 10)) for i in range(23)]


def evaluate(indices: Sequence[int]) -> list[list[EvalItem]]:
    """Answer right but for every fifth question."""
    n = len(indices)
    texts = tuple("none" if i % 5 == 0 else f"ans {(i + 1) % 10}" for i in indices)
    batch = AnswerBatch(texts, ((1,),) * n, (PassCounts(0, 1, 3, 2),) * n, ((9, 11),) * n)
    chosen = [EXAMPLES[i] for i in indices]
    records = match_answers(batch, chosen, DIGIT)
    return [[EvalItem(x.id, {"with CoT": r._asdict()})] for x, r in zip(chosen, records, strict=True)]


def test_match_answers_gives_records_and_figures(tmp_path: Path) -> None:
    items = run_resumable(EvalJob(EvalMetadata("reasoning", "digits"), 23, evaluate, 5), tmp_path)
    assert [item.id for item in items] == [f"q{i}" for i in range(23)]
    assert {*items[0].conditions} == {"with CoT"}
    row = ReasoningRow("digits", "run", "", (0,), [items], "last digit", 100)
    assert row.correct.sum() == 18
    assert sum(item.shared["prediction"] is None for item in items) == 5
    assert row.majority_baseline == ("1", pytest.approx(3 / 23))
    assert row.accuracy.low < 18 / 23 < row.accuracy.high
    assert row.mean_passes == (0, 1, 3, 2)
    assert (row.mean_cache_positions, row.cache_bytes) == ((9, 11), 1100)


def test_extract_last_digit() -> None:
    assert [extract_last_digit(t) for t in ("<<3+4=7>>ans 7", "12", "", "none")] == ["7", "2", None, None]
