"""Time is taken of rows that were not asked before, in batches that are full."""

from collections.abc import Sequence
from typing import Any

import pytest

from laconic.evaluation.reasoning import latency


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
    result = latency.measure_latencies(puts, count, total)
    assert requested == [(name, i) for i in (*warm, *range(min(count, total))) for name in "ab"]
    assert [item.num_questions for item in result] == [min(count, total)] * 2
    assert all(0 < item.median <= item.p90 for item in result)


@pytest.mark.parametrize(
    ("count", "total", "batches", "warm"),
    [(5, 200, 1, 64), (64, 200, 1, 64), (150, 200, 2, 128), (5, 100, 1, 64), (100, 100, 1, 64)],
)
def test_batches_of_64_are_full(count: int, total: int, batches: int, warm: int) -> None:
    requested = list[list[int]]()
    answer: Any = requested.append
    result = latency.measure_throughput(answer, Source(), count, total)  # pyright: ignore
    assert (result.batch_size, result.questions_per_second > 0) == (64, True)
    assert requested == [
        [(warm + i) % total for i in range(64)],
        *([64 * n + i for i in range(64)] for n in range(batches)),
    ]


def test_a_set_of_few_questions_is_one_batch() -> None:
    requested = list[list[int]]()
    answer: Any = requested.append
    assert latency.measure_throughput(answer, Source(), 5, 30).batch_size == 30  # pyright: ignore
    assert requested == [list(range(30))] * 2


@pytest.mark.parametrize(
    ("total", "count", "batch", "output"),
    [(200, 50, 64, 0), (127, 50, 64, 1), (200, 191, 64, 1), (200, 128, 64, 0), (191, 128, 64, 1), (40, 5, 40, 2)],
)
def test_timing_caveats_name_small_sets(total: int, count: int, batch: int, output: int) -> None:
    result = latency.timing_caveats(total, latency.Latency(1.0, 1.0, count), latency.Throughput(1.0, batch))
    assert len(result) == output
    assert not output or "warm-up" in result[-1]
