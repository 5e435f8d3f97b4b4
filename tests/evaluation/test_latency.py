"""Time is taken of rows that were not asked before."""

from collections.abc import Sequence
from typing import Any

import pytest

from laconic.evaluation.reasoning import evaluate


class Source:
    """Rows that are their own numbers."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 200

    def batch(self, rows: Sequence[int], epoch: int, step: int) -> list[int]:
        return list(rows)


@pytest.mark.parametrize(
    ("count", "total", "warm"),
    [(20, 100, list(range(20, 30))), (3, 5, [3, 4, 0, 1, 2, 3, 4, 0, 1, 2]), (9, 2, [0, 1] * 5)],
)
def test_one_at_a_time_after_ten_others_in_turn(count: int, total: int, warm: list[int]) -> None:
    requested = list[tuple[str, int]]()
    puts: Any = [(lambda batch, name=name: requested.append((name, *batch)), Source()) for name in "ab"]
    result = evaluate.measure_latencies(puts, count, total)
    assert requested == [(name, i) for i in (*warm, *range(min(count, total))) for name in "ab"]
    assert [item.num_questions for item in result] == [min(count, total)] * 2
    assert all(item.median > 0 for item in result)
