"""Hand-made answers of runs to questions whose gold answers are 0, 1, 2, 3, 4 in turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from laconic.batches import PassCounts
from laconic.evaluation.reasoning.evaluate import AnswerRecord
from laconic.evaluation.reasoning.table import ReasoningRow
from laconic.evaluation.results_store import EvalItem

PASSES = PassCounts(0, 1, 3, 2)


def answers(right: np.ndarray, passes: PassCounts = PASSES, end: int = 60) -> list[EvalItem]:
    items: list[EvalItem] = []
    for i, yes in enumerate(right):
        gold, question = str(i % 5), f"How many are {i}?"
        text = (gold, gold) if yes else ("no", None)
        record = AnswerRecord(question, gold, *text, bool(yes), passes._asdict(), (50, end))
        items.append(EvalItem(f"q{i}", {"": record._asdict()}))
    return items


def row(
    set: str,
    run: str,
    right: np.ndarray,
    condition: str = "",
    seeds: Sequence[int] = (0,),
    passes: PassCounts = PASSES,
    end: int = 60,
    protocol: str = "codi",
    **more: Any,
) -> ReasoningRow:
    items_by_seed = [answers(x, passes, end) for x in np.atleast_2d(right)]
    return ReasoningRow(set, run, condition, tuple(seeds), items_by_seed, protocol, 2048, **more)
