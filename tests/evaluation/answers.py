"""Hand-made answers of runs to questions whose gold answers are 0, 1, 2, 3, 4 in turn."""

from collections.abc import Sequence

import numpy as np

from laconic.batches import PassCounts
from laconic.evaluation.reasoning.evaluate import AnswerRecord, ReasoningResult
from laconic.evaluation.reasoning.table import ReasoningRow

PASSES = PassCounts(0, 1, 3, 2)


def result(right: np.ndarray, passes: PassCounts = PASSES, end: int = 60, protocol: str = "codi") -> ReasoningResult:
    rows = [
        AnswerRecord(
            f"q{i}",
            f"How many are {i}?",
            str(i % 5),
            str(i % 5) if yes else "no",
            str(i % 5) if yes else None,
            bool(yes),
            passes,
            (50, end),
        )
        for i, yes in enumerate(right)
    ]
    return ReasoningResult(tuple(rows), protocol, 2048)


def predicted(
    predictions: Sequence[str | None], right: Sequence[bool], gold: Sequence[str] = "1123"
) -> ReasoningResult:
    """Predictions for questions, with their gold answers."""
    rows = zip(predictions, right, gold, strict=True)
    records = [AnswerRecord("", "", g, "", x, is_right, PASSES, (50, 60)) for x, is_right, g in rows]
    return ReasoningResult(tuple(records), "digit")


def row(
    set: str,
    run: str,
    right: np.ndarray,
    way: str = "",
    seeds: tuple[int, ...] = (0,),
    passes: PassCounts = PASSES,
    end: int = 60,
    **more: object,
) -> ReasoningRow:
    rights = np.atleast_2d(right)
    return ReasoningRow(set, run, way, seeds, tuple(result(item, passes, end) for item in rights), **more)  # pyright: ignore
