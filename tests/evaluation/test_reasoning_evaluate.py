"""Questions evaluated: answers matched, figures of a result, records stored."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning.answer_matching import DIGIT, extract_last_digit
from laconic.errors import InputError
from laconic.evaluation.reasoning.evaluate import AnswerRecord, ReasoningResult, evaluate_questions
from laconic.evaluation.results_store import EvalMetadata, load_records

EXAMPLES = [ReasoningExample(f"q{i}", f"{i} + 1 =", (), str((i + 1) % 10)) for i in range(23)]


class Questions:
    """A source whose batch is the list of its rows."""

    fingerprint = "f" * 64

    def __len__(self) -> int:
        return len(EXAMPLES)

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> Any:
        return SimpleNamespace(B=len(rows), rows=list(rows))


class Sums:
    """Answers right but for every fifth question; may stop after some calls."""

    def __init__(self, calls: int = 10**9) -> None:
        self.calls, self.rows = calls, []

    def __call__(self, batch: SimpleNamespace) -> AnswerBatch:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.rows += batch.rows
        n = batch.B
        texts = tuple("none" if i % 5 == 0 else f"ans {(i + 1) % 10}" for i in batch.rows)
        return AnswerBatch(texts, ((1,),) * n, (PassCounts(0, 1, 3, 2),) * n, ((9, 11),) * n)


def test_evaluate_questions_gives_records_and_figures() -> None:
    result = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT, batch_size=5, bytes_per_position=100)
    assert [record.id for record in result.records] == [f"q{i}" for i in range(23)]
    assert result.correct.sum() == 18
    figures = result.to_json()
    assert (figures["questions"], figures["unanswered"], figures["protocol"]) == (23, 5, "last digit")
    assert figures["accuracy"] == pytest.approx(18 / 23)
    assert figures["interval"][0] < 18 / 23 < figures["interval"][1]
    assert figures["majority_baseline"] == {"answer": "1", "share": pytest.approx(3 / 23)}
    assert figures["passes"] == {"prompt": 0, "latent_setup": 1, "latent": 3, "answer": 2, "total": 6}
    assert figures["cache_positions"] == {"begin": 9, "end": 11, "bytes": 1100}


def test_evaluate_questions_stores_records_that_load_again(tmp_path: Path) -> None:
    metadata, work = EvalMetadata("reasoning", "digits", variant={"condition": "with CoT"}), Sums()
    result = evaluate_questions(work, Questions(), EXAMPLES, DIGIT, metadata=metadata, folder=tmp_path)
    records = load_records(tmp_path / metadata.folder_name)
    assert {record.condition for record in records} == {"with CoT"}
    assert tuple(map(AnswerRecord.from_record, records)) == result.records
    assert result == evaluate_questions(Sums(0), Questions(), EXAMPLES, DIGIT, metadata=metadata, folder=tmp_path)


def test_evaluate_questions_needs_a_row_for_each_question() -> None:
    assert len(evaluate_questions(Sums(), Questions(), EXAMPLES[:4], DIGIT).records) == 4
    for examples in ([], [*EXAMPLES, *EXAMPLES]):
        with pytest.raises(InputError, match="at least one question"):
            evaluate_questions(Sums(), Questions(), examples, DIGIT)


def test_extract_last_digit() -> None:
    assert [extract_last_digit(t) for t in ("<<3+4=7>>ans 7", "12", "", "none")] == ["7", "2", None, None]


def test_reasoning_result_without_bytes_per_position_has_a_cache_of_0_bytes() -> None:
    records = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT).records
    assert ReasoningResult(records, "last digit").to_json()["cache_positions"]["bytes"] == 0
