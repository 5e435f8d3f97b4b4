"""Answers judged, written as they come, continued after a stop, committed once; and what is timed."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laconic.batches import AnswerBatch, PassCounts, ReasoningExample
from laconic.data.reasoning.answer_matching import DIGIT, extract_last_digit
from laconic.errors import BusyError, CorruptArtifactError, InputError
from laconic.evaluation.reasoning.evaluate import (
    ReasoningResult,
    evaluate_questions,
    load_answer_records,
    parse_answer_record,
)

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
        self.calls, self.asked = calls, []

    def __call__(self, batch: SimpleNamespace) -> AnswerBatch:
        if self.calls == 0:
            raise KeyboardInterrupt
        self.calls -= 1
        self.asked += batch.rows
        n = batch.B
        texts = tuple("none" if i % 5 == 0 else f"ans {(i + 1) % 10}" for i in batch.rows)
        return AnswerBatch(texts, ((1,),) * n, (PassCounts(0, 1, 3, 2),) * n, ((9, 11),) * n)


def test_rows_and_figures() -> None:
    found = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT, batch_size=5, bytes_per_position=100)
    assert [row.id for row in found.records] == [f"q{i}" for i in range(23)]
    assert found.correct.sum() == 18
    told = found.to_json()
    assert (told["questions"], told["unanswered"], told["protocol"]) == (23, 5, "last digit")
    assert told["accuracy"] == pytest.approx(18 / 23)
    assert told["interval"][0] < 18 / 23 < told["interval"][1]
    assert told["floor"] == {"answer": "1", "share": pytest.approx(3 / 23)}
    assert told["passes"] == {"read": 0, "place": 1, "think": 3, "answer": 2, "total": 6}
    assert told["held"] == {"begin": 9, "end": 11, "bytes": 1100}


def test_a_row_comes_back_from_its_line() -> None:
    rows = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT).records
    assert [parse_answer_record(row.to_json_line()) for row in rows] == list(rows)
    assert rows[0].prediction is None


def test_stopped_and_continued_asks_each_question_once(tmp_path: Path) -> None:
    folder, first, second = tmp_path / "evaluations" / "digits", Sums(calls=2), Sums()
    with pytest.raises(KeyboardInterrupt):
        evaluate_questions(first, Questions(), EXAMPLES, DIGIT, batch_size=5, folder=folder, key={"step": "a"})
    part = tmp_path / "evaluations" / ".part-digits" / "answers.jsonl"
    lines = part.read_text().splitlines(keepends=True)
    assert len(lines) == 10
    part.write_text("".join(lines[:8]) + lines[8][:20])  # killed in the middle of a line
    with pytest.raises(BusyError, match="holds answers to other questions or of another step"):
        evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT, folder=folder, key={"step": "b"})
    found = evaluate_questions(
        second, Questions(), EXAMPLES, DIGIT, batch_size=5, folder=folder, key={"step": "a"}, extra_files={"a": "b"}
    )
    assert second.asked == list(range(8, 23))
    assert found == evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["digits"]
    assert {"answers.jsonl", "result.json", "a"} <= {p.name for p in folder.iterdir()}
    assert json.loads((folder / "result.json").read_text()) == found.to_json()


def test_what_is_done_is_read_and_not_asked_again(tmp_path: Path) -> None:
    folder, nobody = tmp_path / "digits", Sums(calls=0)
    found = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT, folder=folder, key={"step": "a"})
    assert evaluate_questions(nobody, Questions(), EXAMPLES, DIGIT, folder=folder, key={"step": "a"}) == found
    with pytest.raises(BusyError, match="is the evaluation of other questions or of another step"):
        evaluate_questions(nobody, Questions(), EXAMPLES, DIGIT, folder=folder, key={"step": "b"})
    with (folder / "answers.jsonl").open("a") as file:
        file.write("more\n")
    with pytest.raises(CorruptArtifactError, match=r"answers\.jsonl has"):
        evaluate_questions(nobody, Questions(), EXAMPLES, DIGIT, folder=folder, key={"step": "a"})


def test_questions_and_rows_must_match() -> None:
    assert len(evaluate_questions(Sums(), Questions(), EXAMPLES[:4], DIGIT).records) == 4
    for examples in ([], [*EXAMPLES, *EXAMPLES]):
        with pytest.raises(InputError, match="rows to ask; give a row for each, and at least one"):
            evaluate_questions(Sums(), Questions(), examples, DIGIT)


def test_progress_is_shown() -> None:
    seen: list[tuple[str, int, int]] = []
    evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT, batch_size=10, progress=lambda *now: seen.append(now))
    assert seen == [("last digit", 10, 23), ("last digit", 20, 23), ("last digit", 23, 23)]


def test_the_last_digit() -> None:
    assert [extract_last_digit(t) for t in ("<<3+4=7>>ans 7", "12", "", "none")] == ["7", "2", None, None]


def test_a_result_without_rows_of_bytes() -> None:
    rows = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT).records
    assert ReasoningResult(rows, "last digit").to_json()["held"]["bytes"] == 0


class Two:
    """One of two ranks that work in turns of threads, as `training.ranks` has them."""

    def __init__(self, rank: int, board: list[list[object]], turn: threading.Barrier) -> None:
        self.rank, self.world, self.board, self.turn = rank, 2, board, turn

    def exchange(self, value: object) -> list[object]:
        self.board[self.rank].append(value)
        self.turn.wait(10)
        found = [said[-1] for said in self.board]
        self.turn.wait(10)
        return found

    def first(self, function: Callable[[], object]) -> object:
        return self.exchange(function() if self.rank == 0 else None)[0]


def test_two_ranks_give_the_rows_of_one_process(tmp_path: Path) -> None:
    alone = evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT)
    board, turn, asked = list[list[object]]([[], []]), threading.Barrier(2), [Sums(), Sums()]

    def rank(number: int) -> ReasoningResult:
        ranks, folder = Two(number, board, turn), tmp_path / "digits"
        return evaluate_questions(
            asked[number], Questions(), EXAMPLES, DIGIT, batch_size=3, folder=folder, key={"step": "a"}, ranks=ranks,  # pyright: ignore
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert found[0].records == found[1].records == alone.records
    assert sorted(asked[0].asked + asked[1].asked) == list(range(23))
    assert len(asked[0].asked) - len(asked[1].asked) in (0, 1)
    assert (
        evaluate_questions(Sums(0), Questions(), EXAMPLES, DIGIT, folder=tmp_path / "digits", key={"step": "a"})
        == alone
    )
    with ThreadPoolExecutor(2) as pool:  # what is there is read by the first and told to the other
        assert [again.records for again in pool.map(rank, range(2))] == [alone.records, alone.records]
    assert sorted(asked[0].asked + asked[1].asked) == list(range(23))


def test_questions_are_asked_in_an_order_of_their_own_and_rows_come_back_in_theirs(tmp_path: Path) -> None:
    order = sorted(range(23), key=lambda i: (i * 7) % 23)
    first, second = Sums(), Sums()

    def stop() -> None:
        if len(first.asked) >= 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_questions(
            first, Questions(), EXAMPLES, DIGIT, batch_size=5, folder=tmp_path / "a", order=order, before_batch=stop
        )
    assert first.asked == order[:10]
    found = evaluate_questions(second, Questions(), EXAMPLES, DIGIT, batch_size=5, folder=tmp_path / "a", order=order)
    assert second.asked == order[10:]
    assert found == evaluate_questions(Sums(), Questions(), EXAMPLES, DIGIT)
    assert load_answer_records(tmp_path / "a") == found.records
